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
#ifdef __x86_64__
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma")))
#endif

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 512        /* elements whose weights are in the first cache, until they are stored */
#define LINE 32          /* elements of weights in a line of the cache */
#define LEAST_TILE (32 * 1024) /* elements that a thread takes at a time: more keep pages of memory open, and fewer let all */
#define MOST_TILE (256 * 1024) /* threads end together, also if another process has a core; 16 a thread if there are so many */
#define MOST_THREADS 64

enum { FP32, BF16, FP16 }; /* types of gradients and weights */
enum { LERP = 1, SQUARE_GRADIENT = 2, SQUARE_MOMENT = 4, DECAY = 8, RATE = 16 }; /* bits of a form */

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
    float factor, decay, weight_decay, coefficient, beta2, of_square, root, eps, rate;
    /* Masks of all bits or none: the bits of a form, and what follows from the settings. */
    uint32_t lerp, square_gradient, square_moment, decays_in_one, decays_gradient, from_average, is_tail;
    enum { OTHER, ADAMW, ADAM } kind; /* in the form of torch's builds for x86, ADAM with a decay of gradients */
} Numbers;

static uint32_t mask(int is) { return is ? ~0u : 0; }

static Numbers numbers_of(const Settings *s, int form, int is_tail) {
    const double step = (float)s->step;
    const double decay = s->body & RATE ? fma(-s->lr, s->weight_decay, 1) : 1 - s->lr * s->weight_decay;
    const float weight = (float)(1 - s->beta1), rest = is_tail ? -(1 - weight) : weight - 1; /* another zero */
    const int is_small = fabsf(weight) < 0.5f, decays_gradient = !s->decoupled && s->weight_decay != 0;
    return (Numbers){
        .factor = (float)s->factor,
        .decay = s->decoupled ? (float)decay : 1,
        .weight_decay = (float)s->weight_decay,
        .coefficient = is_small ? weight : rest,
        .beta2 = (float)s->beta2,
        .of_square = (float)(1 - s->beta2),
        .root = (float)sqrt(1 - pow(s->beta2, step)),
        .eps = (float)s->eps,
        .rate = (float)-(s->lr / (1 - pow(s->beta1, step))),
        .lerp = mask(form & LERP),
        .square_gradient = mask(form & SQUARE_GRADIENT),
        .square_moment = mask(form & SQUARE_MOMENT),
        .decays_in_one = mask(form & DECAY),
        .decays_gradient = mask(decays_gradient),
        .from_average = mask(is_small),
        .is_tail = mask(is_tail),
        .kind = (form | RATE) != (LERP | SQUARE_GRADIENT | DECAY | RATE) ? OTHER : decays_gradient ? ADAM : ADAMW,
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

/* Bits in place of a condition, which keeps compilers from vectorizing. */
INLINE float choose(uint32_t mask, float yes, float no) {
    return to_float((to_bits(yes) & mask) | (to_bits(no) & ~mask));
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

INLINE float load(const void *from, int64_t i, int type) {
    if (type == FP32) return ((const float *)from)[i];
    const uint16_t half = ((const uint16_t *)from)[i];
    return type == BF16 ? to_float((uint32_t)half << 16) : of_fp16(half);
}

/* -- stores past the caches: nobody reads a weight soon, and what it replaces need not be read ---------------------- */

typedef void Store(uint16_t *to, const uint16_t *from, int64_t n);

#ifdef __x86_64__
/* In whole lines of the cache, each in as few stores as there are: in parts of 16 bytes they take a tenth of the step. Memory
 * at an odd address, as of a mapped file, has no such lines. */
#define STORE(name, target, Vector, load, stream)                                                      \
    target static void name(uint16_t *to, const uint16_t *from, int64_t n) {                           \
        const int64_t lanes = sizeof(Vector) / 2;                                                      \
        const int64_t before = (uintptr_t)to & 1 ? n : (int64_t)(-((uintptr_t)to / 2) & (LINE - 1));   \
        int64_t done = before < n ? before : n;                                                        \
        memcpy(to, from, (size_t)done * 2);                                                            \
        for (; done + LINE <= n; done += LINE)                                                         \
            for (int64_t i = done; i < done + LINE; i += lanes)                                        \
                stream((void *)(to + i), load((const void *)(from + i)));                              \
        memcpy(to + done, from + done, (size_t)(n - done) * 2);                                        \
    }
STORE(store_avx2, AVX2, __m256i, _mm256_loadu_si256, _mm256_stream_si256)
STORE(store_avx512, AVX512, __m512i, _mm512_loadu_si512, _mm512_stream_si512)
#else
static void store_plain(uint16_t *to, const uint16_t *from, int64_t n) { memcpy(to, from, (size_t)n * 2); }
#endif

/* -- the step ------------------------------------------------------------------------------------------------------ */

typedef struct {
    float *master, *average, *square, *largest;
    const void *gradient;
    int64_t n;
} Part;

/* A root and two divisions an element take the time; casts, and the choices of a form, are done beside them. Constants of a
 * loop of its own are the kind, whether there is a `largest`, the gradient's type and whether weights in bf16 are `kept`. */
INLINE void change(Part at, const Numbers *of, int kind, int largest, int gradient, uint16_t *restrict kept) {
    float *p = at.master, *m = at.average, *v = at.square, *x = at.largest;
    const float factor = of->factor, weight_decay = of->weight_decay, decay = of->decay, coefficient = of->coefficient;
    const float beta2 = of->beta2, c = of->of_square, root = of->root, eps = of->eps, rate = of->rate;
    const uint32_t lerp = kind ? ~0u : of->lerp, square_gradient = kind ? ~0u : of->square_gradient;
    const uint32_t square_moment = kind ? 0 : of->square_moment, decays_in_one = kind ? ~0u : of->decays_in_one;
    const uint32_t decays_gradient = kind ? mask(kind == ADAM) : of->decays_gradient;
    const uint32_t from_average = of->from_average, is_tail = of->is_tail;
#pragma GCC ivdep
    for (int64_t i = 0; i < at.n; i++) {
        const float alone = load(at.gradient, i, gradient) * factor;
        const float decayed = choose(decays_in_one, fmaf(p[i], weight_decay, alone), alone + p[i] * weight_decay);
        const float g = choose(decays_gradient, decayed, alone), away = g - m[i], base = choose(from_average, m[i], g);
        const float a = choose(lerp, fmaf(coefficient, away, base), coefficient * away + base);
        const float plain = v[i] * beta2 + c * g * g, by_moment = fmaf(v[i], beta2, c * g * g);
        const float by_gradient = fmaf(c * g, g, v[i] * beta2);
        const float s = choose(square_gradient, by_gradient, choose(square_moment, by_moment, plain));
        float most = s;
        if (largest) { /* whatever NaN is */
            const float body = ((x[i] > s) | (x[i] != x[i])) ? x[i] : s, tail = x[i] < s ? s : x[i];
            x[i] = most = choose(is_tail, tail, body);
        }
        const float changed = p[i] * decay + rate * a / (sqrtf(most) / root + eps);
        m[i] = a;
        v[i] = s;
        p[i] = changed;
        if (kept) kept[i] = to_bf16(changed);
    }
}

INLINE void cast(float *to, const void *from, int64_t n, int type) {
    for (int64_t i = 0; i < n; i++) to[i] = load(from, i, type);
}

INLINE void cast_to(uint16_t *restrict to, const float *restrict from, int64_t n, int type) {
    if (type == BF16)
        for (int64_t i = 0; i < n; i++) to[i] = to_bf16(from[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = to_fp16(from[i]);
}

INLINE void change_from(Part at, const Numbers *of, int gradient, uint16_t *kept) {
    if (kept) change(at, of, ADAMW, 0, gradient, kept);
    else change(at, of, ADAMW, 0, gradient, 0);
}

INLINE void range(
    const Job *job, const Settings *s, const Numbers *of, int64_t first, int64_t stop, Store *store, int in_one
) {
    uint16_t kept[BLOCK] __attribute__((aligned(64)));
    float g[BLOCK] __attribute__((aligned(64)));
    const int type = s->gradient, weight = job->weight ? s->weight : FP32; /* in fp32 it is the master */
    for (int64_t i = first; i < stop; i += BLOCK) {
        Part at = {job->master + i, job->average + i, job->square + i, job->largest ? job->largest + i : 0, 0, 0};
        at.gradient = (const char *)job->gradient + i * (type == FP32 ? 4 : 2);
        at.n = stop - i < BLOCK ? stop - i : BLOCK;
        uint16_t *beside = in_one && weight == BF16 && of->kind == ADAMW && !job->largest ? kept : 0;
        if (of->kind == ADAMW && !job->largest) {
            if (type == BF16) change_from(at, of, BF16, beside);
            else if (type == FP16) change_from(at, of, FP16, beside);
            else change_from(at, of, FP32, beside);
        } else { /* seldom: fewer loops for the compiler */
            if (type == BF16) cast(g, at.gradient, at.n, BF16);
            else if (type == FP16) cast(g, at.gradient, at.n, FP16);
            if (type != FP32) at.gradient = g;
            if (job->largest) change(at, of, OTHER, 1, FP32, 0);
            else if (of->kind == ADAM) change(at, of, ADAM, 0, FP32, 0);
            else change(at, of, OTHER, 0, FP32, 0);
        }
        if (weight && !beside) cast_to(kept, at.master, at.n, weight);
        if (weight) store((uint16_t *)job->weight + i, kept, at.n);
    }
}

typedef void Work(const Job *, const Settings *, const Numbers *, int64_t, int64_t);
#define VERSION(name, target, in_one)                                                                      \
    target static void name(const Job *j, const Settings *s, const Numbers *of, int64_t at, int64_t stop) { \
        range(j, s, of, at, stop, store_##name, in_one);                                                   \
    }

#ifdef __x86_64__
VERSION(avx2, AVX2, 0) /* has too few registers to cast in the same loop */
VERSION(avx512, AVX512, 1)
#else
VERSION(plain, , 0)
#endif

static Work *version(void) { /* or NULL: every loop has FMAs, which are calls of a function on older processors */
#ifdef __x86_64__
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int has_words = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (has_avx2 && has_words && __builtin_cpu_supports("avx512f")) return avx512;
    return has_avx2 ? avx2 : 0;
#else
    return plain;
#endif
}

/* -- threads: each takes the next tile when it is free; the caller waits once, at the end --------------------------- */

typedef struct {
    const Job *jobs;
    int64_t num_jobs, tile;
    const Settings *settings;
    Numbers body, tail;
    Work *work;
    fenv_t environment; /* of the caller, as whether it flushes subnormal numbers to zero */
    _Atomic int64_t next;
} Plan;

static void take_tiles(Plan *plan) {
    const Settings *s = plan->settings;
    const int64_t tile = plan->tile;
    int64_t mine = atomic_fetch_add(&plan->next, 1), seen = 0;
    for (int64_t i = 0; i < plan->num_jobs; i++) {
        const Job *job = plan->jobs + i;
        const int64_t whole = job->numel - job->numel % s->width, tiles = (job->numel + tile - 1) / tile;
        for (; mine < seen + tiles; mine = atomic_fetch_add(&plan->next, 1)) {
            const int64_t first = (mine - seen) * tile, end = first + tile < job->numel ? first + tile : job->numel;
            const int64_t middle = end < whole ? end : whole; /* a tile is a multiple of `width` */
            if (first < middle) plan->work(job, s, &plan->body, first, middle);
            if (middle < end) plan->work(job, s, &plan->tail, middle, end);
        }
        seen += tiles;
    }
#ifdef __x86_64__
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

/* Carry out the jobs with at most `num_threads` threads, the caller's among them; change nothing if there is no version for
 * this processor. Its number is that of the structs. */
void zstore_adam_1(const Job *jobs, int64_t num_jobs, const Settings *settings, int32_t num_threads) {
    Plan plan = {jobs, num_jobs, LEAST_TILE, settings, .work = version()};
    int64_t numel = 0;
    for (int64_t i = 0; i < num_jobs; i++) numel += jobs[i].numel;
    while (plan.tile < MOST_TILE && numel / plan.tile >= 32 * (int64_t)num_threads) plan.tile *= 2;
    plan.body = numbers_of(settings, settings->body, 0);
    plan.tail = numbers_of(settings, settings->tail, 1);
    if (!plan.work) return;
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
