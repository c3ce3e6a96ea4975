"""Parallelism of an engine: widths of its axes, the GPUs that it uses, and its label."""

import dataclasses

AXES = {"tp": "tp", "pp": "pp", "dp": "dp", "moe_tp": "moetp", "moe_ep": "moeep"}
"""Name of each axis in a label; an axis of width 1 is omitted, except the first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PickedParallelConfig:
    """Widths of tensor, pipeline and data parallelism, and of tensor and expert parallelism of the experts."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    moe_tp: int = 1
    moe_ep: int = 1

    @property
    def num_gpus(self) -> int:
        """Return the GPUs of one engine: the widest axis of a stage, times the stages; attention and experts share GPUs."""
        return self.pp * max(self.tp, self.dp, self.moe_tp * self.moe_ep)

    @property
    def tp_size(self) -> int:
        """Return into how many parts the KV heads are split: one with expert parallelism."""
        if self.moe_ep > 1:
            return 1
        return self.moe_tp if self.moe_tp > 1 else self.tp

    def label(self) -> str:
        """Return a name that differs for all widths, for example `tp2-moeep2`."""
        widths = {name: getattr(self, axis) for axis, name in AXES.items()}
        return "-".join(f"{name}{width}" for name, width in widths.items() if name == "tp" or width > 1)


def picked_to_aic_model_config_kwargs(p: PickedParallelConfig) -> dict[str, int]:
    """Return the arguments of the performance database's model configuration."""
    return {
        "tp_size": p.tp,
        "pp_size": p.pp,
        "moe_tp_size": p.moe_tp,
        "moe_ep_size": p.moe_ep,
        "attention_dp_size": p.dp,
    }
