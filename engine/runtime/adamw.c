/* One step of Adam or AdamW over host memory in one pass: a gradient in bf16, fp16 or fp32 in, fp32 master and moments
 * changed in place, the weight out in 16 bits.
 *
 * The operations, and their order, are those of torch's fused kernel for the CPU. Its compiler contracts some products
 * and sums into one operation; which ones is the caller's `Settings.body` and `tail` (native.py finds them). Here the
 * compiler must contract none: -ffp-contract=off. No header of Python or torch, so that one build serves all.
 */
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 256        /* elements whose gradient is cast at a time: they, and their state, are in the first cache */
#define TILE (32 * 1024) /* elements that a thread takes at a time */
#define MOST_THREADS 64

enum { FP32, BF16, FP16 }; /* types of gradients and weights */
enum { LERP = 1, SQUARE_GRADIENT = 2, SQUARE_MOMENT = 4, DECAY = 8, RATE = 16, LARGEST = 32, LAST = 64 }; /* bits of a form */

typedef struct {
    float *master, *average, *square, *largest; /* `largest`: of amsgrad, or NULL */
    const void *gradient;
    void *weight; /* in 16 bits, or NULL */
    int64_t numel;
} Job;

typedef struct {
    double lr, beta1, beta2, weight_decay, eps, step, factor;
    int32_t gradient, weight;     /* types */
    int32_t decoupled, body, tail; /* AdamW; forms of whole vectors of torch's, and of a job's last elements */
    int32_t width;                /* elements of a vector of torch's */
} Settings;

typedef struct {
    float factor, decay, weight_decay, coefficient, of_last, beta2, of_square, root, eps, rate;
    int from_average;
} Numbers;

static Numbers numbers_of(const Settings *s) {
    const double step = (float)s->step;
    const double decay = s->body & RATE ? fma(-s->lr, s->weight_decay, 1) : 1 - s->lr * s->weight_decay;
    const float weight = (float)(1 - s->beta1);
    const int is_small = fabsf(weight) < 0.5f;
    return (Numbers){
        .factor = (float)s->factor,
        .decay = s->decoupled ? (float)decay : 1,
        .weight_decay = s->decoupled ? 0 : (float)s->weight_decay,
        .coefficient = is_small ? weight : weight - 1,
        .of_last = is_small ? weight : -(1 - weight), /* another zero */
        .beta2 = (float)s->beta2,
        .of_square = (float)(1 - s->beta2),
        .root = (float)sqrt(1 - pow(s->beta2, step)),
        .eps = (float)s->eps,
        .rate = (float)-(s->lr / (1 - pow(s->beta1, step))),
        .from_average = is_small,
    };
}

/* -- casts: to the nearest, to even if there are two; exact in the other direction --------------------------------- */

INLINE float to_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE uint32_t to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

INLINE float of_fp16(uint16_t h) {
    const uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    const uint32_t normal = magnitude + (magnitude < 31u << 23 ? 112u << 23 : 224u << 23); /* or infinity and NaN */
    const uint32_t small = to_bits(to_float((h & 0x7fff) | 126u << 23) - 0.5f);
    return to_float((magnitude < 1u << 23 ? small : normal) | (uint32_t)(h & 0x8000) << 16);
}

INLINE uint16_t to_bf16(float f) {
    const uint32_t bits = to_bits(f), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

INLINE uint16_t to_fp16(float f) {
    const uint32_t bits = to_bits(f), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t small = to_bits(to_float(magnitude) + 0.5f) - (126u << 23);
    const uint32_t finite = magnitude < 113u << 23 ? small : normal;
    const uint32_t endless = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)((magnitude < 143u << 23 ? finite : endless) | (bits >> 16 & 0x8000));
}

INLINE void load(float *restrict to, const void *from, int64_t first, int64_t n, int type, float factor) {
    const float *f = (const float *)from + first;
    const uint16_t *h = (const uint16_t *)from + first;
    if (type == FP32)
        for (int64_t i = 0; i < n; i++) to[i] = f[i] * factor;
    else if (type == BF16)
        for (int64_t i = 0; i < n; i++) to[i] = to_float((uint32_t)h[i] << 16) * factor;
    else
        for (int64_t i = 0; i < n; i++) to[i] = of_fp16(h[i]) * factor;
}

/* Past the caches: nobody reads it soon, and what it replaces need not be read. */
INLINE void store(uint16_t *restrict to, const float *restrict from, int64_t n, int type) {
    uint16_t kept[BLOCK] __attribute__((aligned(64)));
    if (type == BF16)
        for (int64_t i = 0; i < n; i++) kept[i] = to_bf16(from[i]);
    else
        for (int64_t i = 0; i < n; i++) kept[i] = to_fp16(from[i]);
    int64_t done = 0;
#ifdef __SSE2__
    if (((uintptr_t)to & 15) == 0)
        for (; done + 8 <= n; done += 8)
            _mm_stream_si128((__m128i *)(to + done), _mm_load_si128((const __m128i *)(kept + done)));
#endif
    memcpy(to + done, kept + done, (size_t)(n - done) * 2);
}

/* -- the step ------------------------------------------------------------------------------------------------------ */

INLINE void change(const Job *job, int64_t at, int64_t n, const float *restrict g, const Numbers *of, int form) {
    float *restrict p = job->master + at, *restrict m = job->average + at, *restrict v = job->square + at;
    float *restrict x = form & LARGEST ? job->largest + at : 0;
    const float coefficient = form & LAST ? of->of_last : of->coefficient, beta2 = of->beta2, c = of->of_square;
    const float decay = of->decay, root = of->root, eps = of->eps, rate = of->rate;
    const int from_average = of->from_average;
    for (int64_t i = 0; i < n; i++) {
        const float away = g[i] - m[i], base = from_average ? m[i] : g[i];
        const float a = form & LERP ? fmaf(coefficient, away, base) : coefficient * away + base;
        float s;
        if (form & SQUARE_GRADIENT) s = fmaf(c * g[i], g[i], v[i] * beta2);
        else if (form & SQUARE_MOMENT) s = fmaf(v[i], beta2, c * g[i] * g[i]);
        else s = v[i] * beta2 + c * g[i] * g[i];
        m[i] = a;
        v[i] = s;
        if (form & LARGEST && form & LAST) x[i] = s = x[i] < s ? s : x[i]; /* whatever NaN is */
        else if (form & LARGEST) x[i] = s = x[i] > s || x[i] != x[i] ? x[i] : s;
        p[i] = p[i] * decay + rate * a / (sqrtf(s) / root + eps);
    }
}

INLINE void range(const Job *job, const Settings *s, const Numbers *of, int form, int64_t at, int64_t stop) {
    float g[BLOCK] __attribute__((aligned(64)));
    const int moments = form & (LERP | SQUARE_GRADIENT | SQUARE_MOMENT | LAST);
    for (; at < stop; at += BLOCK) {
        const int64_t n = stop - at < BLOCK ? stop - at : BLOCK;
        const float *p = job->master + at;
        load(g, job->gradient, at, n, s->gradient, of->factor);
        if (of->weight_decay != 0 && form & DECAY)
            for (int64_t i = 0; i < n; i++) g[i] = fmaf(p[i], of->weight_decay, g[i]);
        else if (of->weight_decay != 0)
            for (int64_t i = 0; i < n; i++) g[i] = g[i] + p[i] * of->weight_decay;
        /* A loop of its own for each of the usual cases. */
        if (job->largest) change(job, at, n, g, of, moments | LARGEST);
        else if (moments == (LERP | SQUARE_GRADIENT)) change(job, at, n, g, of, LERP | SQUARE_GRADIENT);
        else if (moments == 0) change(job, at, n, g, of, 0);
        else change(job, at, n, g, of, moments);
        if (job->weight) store((uint16_t *)job->weight + at, p, n, s->weight);
    }
}

typedef void Work(const Job *, const Settings *, const Numbers *, int, int64_t, int64_t);
#define VERSION(name, target)                                                                                         \
    target static void name(const Job *j, const Settings *s, const Numbers *of, int form, int64_t at, int64_t stop) { \
        range(j, s, of, form, at, stop);                                                                              \
    }

VERSION(plain, )
#ifdef __x86_64__
VERSION(avx2, __attribute__((target("avx2,fma"))))
VERSION(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma"))))
#endif

static Work *version(void) {
#ifdef __x86_64__
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int has_words = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (has_avx2 && has_words && __builtin_cpu_supports("avx512f")) return avx512;
    if (has_avx2) return avx2;
#endif
    return plain;
}

/* -- threads: each takes the next tile when it is free; the caller waits once, at the end --------------------------- */

typedef struct {
    const Job *jobs;
    int64_t num_jobs;
    const Settings *settings;
    Numbers numbers;
    Work *work;
    fenv_t environment; /* of the caller, as whether it flushes subnormal numbers to zero */
    _Atomic int64_t next;
} Plan;

static void take_tiles(Plan *plan) {
    const Settings *s = plan->settings;
    int64_t mine = atomic_fetch_add(&plan->next, 1), seen = 0;
    for (int64_t i = 0; i < plan->num_jobs; i++) {
        const Job *job = plan->jobs + i;
        const int64_t whole = job->numel - job->numel % s->width, tiles = (job->numel + TILE - 1) / TILE;
        for (; mine < seen + tiles; mine = atomic_fetch_add(&plan->next, 1)) {
            const int64_t first = (mine - seen) * TILE, end = first + TILE < job->numel ? first + TILE : job->numel;
            const int64_t middle = end < whole ? end : whole; /* a tile is a multiple of `width` */
            if (first < middle) plan->work(job, s, &plan->numbers, s->body, first, middle);
            if (middle < end) plan->work(job, s, &plan->numbers, s->tail | LAST, middle, end);
        }
        seen += tiles;
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
}

#define UNUSED {.lock = PTHREAD_MUTEX_INITIALIZER, .begin = PTHREAD_COND_INITIALIZER, .end = PTHREAD_COND_INITIALIZER}
static pthread_mutex_t used = PTHREAD_MUTEX_INITIALIZER; /* by one caller at a time */
static struct pool {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    pthread_t threads[MOST_THREADS];
    int num_threads, open, running, ending;
    Plan *plan; /* NULL once all of its tiles were taken */
} pool = UNUSED;

static void *serve(void *nothing) {
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.ending && (!pool.plan || !pool.open)) pthread_cond_wait(&pool.begin, &pool.lock);
        if (pool.ending) break;
        Plan *plan = pool.plan;
        pool.open--;
        pool.running++;
        pthread_mutex_unlock(&pool.lock);
        fesetenv(&plan->environment);
        take_tiles(plan);
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0) pthread_cond_signal(&pool.end);
    }
    pthread_mutex_unlock(&pool.lock);
    return nothing;
}

static void forget(void) { /* in a forked child: it has none of the threads, and its parent may have held the locks */
    used = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool = (struct pool)UNUSED;
}

__attribute__((constructor)) static void loaded(void) { pthread_atfork(0, 0, forget); }

static void start(int wanted) { /* fewer if no more can be started */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's threads */
    while (pool.num_threads < wanted && !pthread_create(pool.threads + pool.num_threads, 0, serve, 0))
        pool.num_threads++;
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Carry out the jobs with at most `num_threads` threads, the caller's among them. Its number is that of the structs. */
void zstore_adam_1(const Job *jobs, int64_t num_jobs, const Settings *settings, int32_t num_threads) {
    Plan plan = {jobs, num_jobs, settings, .numbers = numbers_of(settings), .work = version()};
    const int others = (num_threads < MOST_THREADS ? num_threads : MOST_THREADS) - 1;
    if (others < 1 || pthread_mutex_trylock(&used)) {
        take_tiles(&plan);
        return;
    }
    fegetenv(&plan.environment);
    start(others);
    pthread_mutex_lock(&pool.lock);
    pool.plan = &plan;
    pool.open = others;
    pthread_cond_broadcast(&pool.begin);
    pthread_mutex_unlock(&pool.lock);
    take_tiles(&plan);
    pthread_mutex_lock(&pool.lock);
    pool.plan = 0;
    while (pool.running) pthread_cond_wait(&pool.end, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&used);
}

/* End the threads; a later call starts others. */
void zstore_adam_end(void) {
    pthread_mutex_lock(&used);
    pthread_mutex_lock(&pool.lock);
    pool.ending = 1;
    pthread_cond_broadcast(&pool.begin);
    pthread_mutex_unlock(&pool.lock);
    for (; pool.num_threads; pool.num_threads--) pthread_join(pool.threads[pool.num_threads - 1], 0);
    pool.ending = 0;
    pthread_mutex_unlock(&used);
}
