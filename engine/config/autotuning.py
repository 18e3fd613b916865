"""The section `autotuning`, which `zstore tune` reads."""

from typing import Annotated, Literal

from .keys import Section, built, no_effect, refused
from .values import Bool, Name, OneOf, Positive, Unread, Words

Mappings = Annotated[dict[Name, Name], Words("an object of config keys and options, both strings")]


class ModelInfoSection(Section):
    """Size of the model, from which the plan tells which trials fit if `zstore tune` gets no --model. All three are needed."""

    num_params: Positive | None = built(None)
    """Parameters."""
    hidden_size: Positive | None = built(None)
    """Width."""
    num_layers: Positive | None = built(None)
    """Layers."""
    profile: Bool = no_effect(False, "the sizes are taken as they are written")


class AutotuningSection(Section):
    """How `zstore tune` searches for a config. It reads the section whether or not it is enabled. See docs/tuning.md."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Remind whoever trains with this config that `zstore tune` acts on the section: a line says so, and the run trains with
    the config as it is."""
    metric: Annotated[Literal["throughput", "latency", "flops"], OneOf()] = built("throughput")
    """The goal: most samples a second, least seconds a step, or most floating-point operations a second, which for one
    model is the same as most samples."""
    fast: Bool = no_effect(False, "only stages, offload and micro-batches are tried, in any case")
    min_train_batch_size: Positive = no_effect(1, "the micro-batch gives the samples of a step, if the config does not")
    max_train_batch_size: Positive | None = built(None)
    """Most samples of a step, if the config leaves the batch "auto". Unset: no limit."""
    min_train_micro_batch_size_per_gpu: Positive = built(1)
    """Smallest micro-batch to try."""
    max_train_micro_batch_size_per_gpu: Positive = built(1024)
    """Largest micro-batch to try."""
    num_tuning_micro_batch_sizes: Positive = built(3)
    """Micro-batches to try for each stage and offload: of the doublings that fit by the plan, the largest."""
    tuner_type: Annotated[Literal["gridsearch", "random", "model_based"], OneOf()] = no_effect(
        "model_based", "the fastest by the plan is tried first"
    )
    tuner_early_stopping: Positive = built(5)
    """Stop after so many trials without a better one."""
    tuner_num_trials: Positive = built(50)
    """Most trials."""
    start_profile_step: Positive = built(3)
    """First step of a trial that is timed; those before warm up."""
    end_profile_step: Positive = built(5)
    """Last step of a trial."""
    results_dir: Name = built("autotuning_results")
    """Folder of the best config and the table of trials."""
    exps_dir: Name = built("autotuning_exps")
    """Folder with a folder for each trial: its config, its output and its journal."""
    overwrite: Bool = no_effect(False, "each search begins anew")
    arg_mappings: Mappings | None = built(None)
    """Options of a script that repeat keys of the config, as
    {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}: each trial sets them too."""
    model_info: ModelInfoSection = ModelInfoSection()
    model_info_path: Unread = no_effect(None, "nothing about the model is written to a file")
    metric_path: Unread = no_effect(None, "trials are timed by the journal that each writes")
    mp_size: Positive = refused(1, "there is no model parallelism; remove the key")
