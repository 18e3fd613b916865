"""The sections about training data: `curriculum_learning` and `data_efficiency`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ValidationError

from ...config.keys import ConfigProblem, Section, built, type_of
from ...config.values import Bool, Count, Name, OneOf, Positive, Whole, Words, expected, show

_Wholes = Annotated[tuple[Whole, ...], Words("a list of whole numbers")]
_SCHEDULES = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


class ScheduleConfigSection(Section):
    """The numbers of a schedule of difficulties."""

    renames: ClassVar[Mapping[str, str]] = {"total_step": "total_curriculum_step"}

    total_curriculum_step: Positive | None = built(None)
    """Steps after which the difficulty is the largest, for fixed_linear and fixed_root. Needed there."""
    difficulty_step: Positive | None = built(None)
    """The difficulty is rounded down to a multiple of this, for fixed_linear and fixed_root; 8 or 16 lets devices multiply
    16-bit matrices fast. Needed there."""
    root_degree: Positive | None = built(None)
    """Degree of the root in fixed_root: 2 rises fast at first. Needed there."""
    difficulty: _Wholes | None = built(None)
    """The difficulties of fixed_discrete, one after another. Needed there."""
    max_step: _Wholes | None = built(None)
    """The last step of each of them but the last, which has no end. Needed with fixed_discrete."""


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
"""Kind of schedule -> keys that it needs."""


class ScheduleSection(Section):
    """A difficulty that rises with the steps."""

    min_difficulty: Positive | None = built(None)
    """The first difficulty. Needed."""
    max_difficulty: Positive | None = built(None)
    """The largest difficulty; once it is reached it stays. Needed."""
    schedule_type: Annotated[_SCHEDULES, OneOf()] | None = built(None)
    """How it rises from step 1 on. "fixed_linear": in proportion to the step. "fixed_root": with a root of it.
    "fixed_discrete": as a list says. "custom": by the function given to
    `engine.set_custom_curriculum_learning_schedule`. Needed."""
    schedule_config: ScheduleConfigSection = ScheduleConfigSection()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the errors of the schedule, each after the key that it is about."""
        first, last, kind, config = self.min_difficulty, self.max_difficulty, self.schedule_type, self.schedule_config
        if first is None or last is None or kind is None:
            for name in ("min_difficulty", "max_difficulty", "schedule_type"):
                if getattr(self, name) is None:
                    kind_of = expected(type_of(type(self).model_fields[name]))
                    yield name, f"the key is missing; expected {kind_of}"
            return
        if first > last:
            yield "min_difficulty", f"{first} is above max_difficulty {last}"
        missing = [name for name in _NEEDED[kind] if getattr(config, name) is None]
        for name in missing:
            yield f"schedule_config.{name}", f"the key is missing, and {kind} needs it"
        if missing:
            return
        if kind in ("fixed_linear", "fixed_root") and first < (config.difficulty_step or 1):
            yield (
                "min_difficulty",
                f"{first} is rounded down to a multiple of difficulty_step, which is 0; give at least that step",
            )
        if kind == "fixed_discrete":
            yield from _list_problems(config)


def _list_problems(config: ScheduleConfigSection) -> Iterator[tuple[str, str]]:
    levels, ends = config.difficulty or (), config.max_step or ()
    if len(levels) != len(ends) + 1:
        yield "schedule_config.difficulty", f"expected one entry more than in max_step ({len(ends)}), got {len(levels)}"
    if any(level < 1 for level in levels):
        yield "schedule_config.difficulty", "expected difficulties of at least 1"
    if list(ends) != sorted(set(ends)):
        yield "schedule_config.max_step", "expected steps that rise"


class CurriculumSection(ScheduleSection):
    """Sequences that grow with the steps: in training, the arguments of `engine(...)` are cut to the present length. See
    docs/data.md."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Cut the second dimension of tensors, or their only one, if it is as long as that of `input_ids`. A model whose
    `forward` has a parameter `curriculum_seqlen` gets the length by that name, and cuts by itself."""
    curriculum_type: Annotated[Literal["seqlen"], OneOf()] = built("seqlen")
    """The difficulty that rises: tokens of a sequence."""

    def contradictions(self, settings: Any) -> Iterator[ConfigProblem]:
        yield from (ConfigProblem((f"curriculum_learning.{key}",), what) for key, what in self.problems())


class MetricSection(ScheduleSection):
    """A metric of samples, and up to which of its values samples are drawn."""

    index_to_sample_path: Name | None = built(None)
    """The samples of each value: DeepSpeed's indexed data set, by its path without .bin and .idx."""
    index_to_metric_path: Name | None = built(None)
    """The values, one for each row of that; needed for difficulty_type "value"."""
    sample_to_metric_path: Name | None = built(None)
    """In their place the value of each sample: a .npy file, as `zstore.data.analyze` writes, or DeepSpeed's
    indexed data set."""
    difficulty_type: Annotated[Literal["value", "percentile"], OneOf()] = built("value")
    """"value": samples whose metric is at most the difficulty. "percentile": that many hundredths (parts of max_difficulty)
    of the samples, those of the least metric."""
    clustering_type: Annotated[Literal["single_cluster", "schedule_based"], OneOf()] = built("schedule_based")
    """"schedule_based": the difficulty limits which samples are drawn. "single_cluster": all are drawn, and a function given to
    `engine.set_data_post_process_func` may use the difficulty."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the errors of the metric, each after the key that it is about."""
        yield from super().problems()
        if self.clustering_type == "single_cluster" or self.sample_to_metric_path is not None:
            return
        if self.index_to_sample_path is None:
            yield "index_to_sample_path", "the key is missing; give it, or sample_to_metric_path"
        elif self.index_to_metric_path is None and self.difficulty_type == "value":
            yield "index_to_metric_path", 'the key is missing, and difficulty_type "value" needs it'


def _metrics(value: object) -> dict[str, MetricSection]:
    """Return the metrics of an object by name. Raises ValueError that names the errors."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object with a metric under each name, got {show(value)}")
    found: dict[str, MetricSection] = {}
    for name, raw in value.items():
        if isinstance(raw, MetricSection):
            found[str(name)] = raw
            continue
        try:
            found[str(name)] = MetricSection.model_validate(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, (name, *first["loc"])))
            keys = ", ".join(MetricSection.model_fields)
            text = f"unknown key; the keys there are {keys}" if first["type"] == "extra_forbidden" else first["msg"]
            raise ValueError(f"{key}: {text.removeprefix('Value error, ')}") from error
    return found


_Metrics = Annotated[Any, BeforeValidator(_metrics), Words("an object: a metric under each name, see docs/data.md")]


class SamplingCurriculumSection(Section):
    """Samples that become harder: those are drawn whose metrics are within the present difficulties."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Draw so, from the `training_data` of `initialize()`."""
    curriculum_metrics: _Metrics = built({})
    """Metrics of samples by name; a sample is drawn if every one of them allows it."""


class DataSamplingSection(Section):
    """How the loader that `initialize()` makes of `training_data` draws samples."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Use this section."""
    num_epochs: Positive = built(1000)
    """Epochs, of as many samples as the data set has, after which the loader is at its end, as in DeepSpeed."""
    num_workers: Count = built(0)
    """Processes of each rank that read samples ahead; 0: read in the training process."""
    pin_memory: Bool = built(False)
    """Have the loader put tensors into pinned memory, from which CUDA copies faster."""
    curriculum_learning: SamplingCurriculumSection = SamplingCurriculumSection()


class DataEfficiencySection(Section):
    """Which samples are drawn, and which tokens are computed. See docs/data.md."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Use this section."""
    seed: Count = built(1234)
    """Seed of the draws of a curriculum; fixed, so that two runs that say nothing about it agree."""
    data_sampling: DataSamplingSection = DataSamplingSection()

    @property
    def sampling(self) -> DataSamplingSection | None:
        """How samples are drawn; None if the section does not say."""
        return self.data_sampling if self.enabled and self.data_sampling.enabled else None

    @property
    def metrics(self) -> dict[str, MetricSection]:
        """The metrics of a curriculum by name; empty without one."""
        curriculum = None if self.sampling is None else self.sampling.curriculum_learning
        found: dict[str, MetricSection] = {}
        return found if curriculum is None or not curriculum.enabled else found | curriculum.curriculum_metrics

    def contradictions(self, settings: Any) -> Iterator[ConfigProblem]:
        sampling = self.sampling
        if sampling is None or not sampling.curriculum_learning.enabled:
            return
        prefix = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
        if not self.metrics:
            yield ConfigProblem((prefix,), "expected at least one metric, got none")
        for name, metric in self.metrics.items():
            for key, what in metric.problems():
                yield ConfigProblem((f"{prefix}.{name}.{key}",), what)
