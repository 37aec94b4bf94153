"""From a method's name to weights: the table of methods, what each needs, and the checks.

Dimensions: N completions, T positions.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from credit import delta as delta_module
from credit.advantages import ADVANTAGES
from credit.delta import Feature, delta
from credit.eapo import QUADRANTS, eapo
from credit.gcpo import SIGNALS_OF, gcpo
from credit.ibpo import ibpo
from credit.weights import arca, divergence, entropy_reduction, forking, normalise, permuted, surprisal, uniform

Method = Callable[..., Any]

SIGNALS = ("logp", "logp_base", "entropy", "residual", "logp_negative", "kl_negative", "delta_feature")
"""What a method may ask of the credit actor, by naming a parameter so."""
CONTEXT = ("advantages_N", "groups_N", "changed_NT")
"""What a method may ask of the batch, in the same way."""

WEIGHTS: dict[str, Method] = {
    "uniform": uniform,
    "surprisal": surprisal,
    "entropy_reduction": entropy_reduction,
    "divergence": divergence,
    "arca": arca,
    "forking": forking,
}
"""Methods that return alpha, which the shared normaliser sharpens and brings to mean one."""
SELF_NORMALISED: dict[str, Method] = {"gcpo": gcpo, "delta": delta, "eapo": eapo, "ibpo": ibpo}
"""Methods that return weights as their papers define them."""
METHODS: dict[str, Method] = {**WEIGHTS, **SELF_NORMALISED}


def resolve(name: str) -> Method:
    """The function of a name of METHODS, or of a dotted path. ValueError when there is none."""
    if name in METHODS:
        return METHODS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(
            f"credit.method: got {name!r}, expected one of {', '.join(METHODS)}, or the dotted path of a function"
        )
    try:
        method: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ValueError(f"credit.method: {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(method):
        raise ValueError(f"credit.method: {name!r} is {type(method).__name__}, expected a function of signals")
    try:
        _, parameters = _signature(method)
    except ValueError:
        raise ValueError(f"credit.method: {name!r} does not say which parameters it takes") from None
    for parameter in parameters:
        known = parameter.name in SIGNALS or parameter.name in ("advantages_N", "groups_N")
        if not known and parameter.default is parameter.empty:
            raise ValueError(
                f"credit.method: {name!r} needs {parameter.name!r}, which is no signal and has no default; "
                f"the signals are {', '.join(SIGNALS)}"
            )
    return method


def needs(name: str, *, quadrant: str | None = None, **options: Any) -> frozenset[str]:
    """The signals that a method needs under these options; a quadrant mask needs `entropy` as well."""
    method = resolve(name)
    if method is gcpo:
        signals = SIGNALS_OF.get(str(options.get("divergence", "k3")), frozenset())
    else:
        signals = frozenset(parameter.name for parameter in _signature(method)[1] if parameter.name in SIGNALS)
    return signals | {"entropy"} if quadrant else signals


@torch.no_grad()
def weights(
    name: str,
    signals: Mapping[str, Any],
    mask: Tensor,
    *,
    sharpening: float = 1.0,
    permute: bool = False,
    seed: int = 0,
    keys: Tensor | None = None,
    advantages: Tensor | None = None,
    groups: Tensor | None = None,
    changed: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Per-token weights m, A_{i,t} = A_i m_{i,t}. [N, T] float32, 0 outside the mask.

    Mean one over each completion; exceptions: `delta` (over the batch), `eapo` (near one), `ibpo` (0 or 1), and the
    `cdf` normaliser of `gcpo`. These exceptions and `gcpo` take no sharpening.

    signals: name -> [N, T] (`delta_feature`: [N, T, H], or a `credit.delta.Feature`); values outside the mask are
    ignored. mask: [N, T] bool. keys: [N, 2] group and index, from which `permute` takes its shuffles (default: the
    row's number). advantages, groups: [N], for `eapo` and `delta`. changed: [N, T], for `ibpo`.
    Raises ValueError for an unknown name or option, a missing signal, and values that are not finite under the mask.
    """
    mask = torch.as_tensor(mask, dtype=torch.bool)
    method = resolve(name)
    check_options(name, method, options)
    if not sharpening > 0:
        raise ValueError(f"credit.sharpening: got {sharpening!r}, expected more than 0")
    if name in SELF_NORMALISED and sharpening != 1:
        raise ValueError(f"credit.sharpening: got {sharpening!r}, expected 1: {name!r} normalises its own weights")
    context = {"advantages_N": advantages, "groups_N": groups, "changed_NT": changed}
    wanted = [parameter.name for parameter in _signature(method)[1] if parameter.name in CONTEXT]
    for missing in [key for key in wanted if context[key] is None]:
        raise ValueError(f"credit.weights: method {name!r} needs {missing.rpartition('_')[0]}=, got None")
    inputs = {signal: signal_of(signals, signal, mask, f"method {name!r}") for signal in sorted(needs(name, **options))}
    out_NT = method(mask, **inputs, **{key: context[key] for key in wanted}, **options)
    _check_output(name, out_NT, mask)
    weights_NT = torch.where(mask, out_NT.float(), 0.0)
    if name not in SELF_NORMALISED:
        weights_NT = normalise(weights_NT, mask, sharpening)
    if permute:
        rows_N = torch.arange(len(mask))
        keys = torch.stack([rows_N, torch.zeros_like(rows_N)], dim=1) if keys is None else keys
        weights_NT = permuted(weights_NT, mask, keys, seed)
    return weights_NT


@torch.no_grad()
def advantages(name: str, rewards: Tensor, groups: Tensor, **options: Any) -> Tensor:
    """Group advantages by name. [N], [N] -> [N] float32. ValueError for an unknown name or option, or a NaN reward."""
    if name not in ADVANTAGES:
        raise ValueError(f"credit.advantage: got {name!r}, expected one of {', '.join(ADVANTAGES)}")
    check_options(name, ADVANTAGES[name], options, "credit.advantage_options")
    return ADVANTAGES[name](rewards, groups, **options)


def signal_of(
    signals: Mapping[str, Any], name: str, mask: Tensor, reader: str, labels: Sequence[str] | None = None
) -> Any:
    """One signal in float32 with zeros outside the mask. ValueError when it is missing, misshapen or not finite.

    reader: who needs it; labels: [N] names of the rows, both for the message.
    """
    if name not in signals:
        raise ValueError(f"signal {name!r}: missing, {reader} needs it; got {', '.join(sorted(signals)) or 'none'}")
    if isinstance(signals[name], Feature):
        return signals[name]
    values = torch.as_tensor(signals[name]).detach().float()
    if values.shape[:2] != mask.shape or values.ndim != (3 if name == "delta_feature" else 2):
        raise ValueError(f"signal {name!r}: got shape {list(values.shape)}, expected {list(mask.shape)} like the mask")
    over_mask = mask.reshape(mask.shape + (1,) * (values.ndim - 2))
    wrong = ~values.isfinite() & over_mask
    if wrong.any():
        row, position = wrong.nonzero()[0, :2].tolist()
        label = labels[row] if labels else f"row {row}"
        raise ValueError(f"signal {name!r}: NaN or infinite at {label}, position {position}, expected finite values")
    values = torch.where(over_mask, values, 0.0)
    return delta_module.in_memory(values, mask) if name == "delta_feature" else values


def check(
    method: str,
    advantage: str = "grpo",
    *,
    sharpening: float = 1.0,
    quadrant: str | None = None,
    options: Mapping[str, Any] | None = None,
    advantage_options: Mapping[str, Any] | None = None,
    negative: str | None = None,
) -> None:
    """Raise ValueError, with one line that names the setting, for a credit configuration that cannot run.

    Runs the method and the advantage on a toy batch, so that a bad value of an option, or a function of the user's
    that returns the wrong thing, is found before anything starts.
    """
    options, advantage_options = dict(options or {}), dict(advantage_options or {})
    function = resolve(method)
    check_options(method, function, options)
    if quadrant is not None and quadrant not in QUADRANTS:
        raise ValueError(f"credit.quadrant: got {quadrant!r}, expected one of {', '.join(QUADRANTS)}")
    contrast = needs(method, **options) & {"logp_negative", "kl_negative"}
    if contrast and negative is None:
        raise ValueError(
            f"credit.negative: got None, but credit.method={method!r} needs {', '.join(sorted(contrast))}: "
            "give a template, 'empty' or a dotted path"
        )
    toy = torch.tensor([[0.1, 0.4, 0.2], [0.3, 0.2, 0.5]])
    groups_N, mask_NT = torch.zeros(2, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
    signals = {name: -toy if name.startswith("logp") else toy for name in SIGNALS} | {"delta_feature": toy[..., None]}
    try:
        advantages_N = advantages(advantage, torch.tensor([0.0, 1.0]), groups_N, **advantage_options)
        weights(
            method, signals, mask_NT, sharpening=sharpening, advantages=advantages_N, groups=groups_N, changed=mask_NT,
            **options,
        )  # fmt: skip
    except ValueError:
        raise
    except Exception as error:  # a function of the user's may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"credit: method {method!r} with options {options}, or advantage {advantage!r} with {advantage_options}, "
            f"fails on a toy batch: {reason}"
        ) from error


def _signature(function: Method) -> tuple[inspect.Parameter | None, list[inspect.Parameter]]:
    """The first parameter (the mask, or the rewards), and the keyword parameters after it."""
    first, *rest = list(inspect.signature(function).parameters.values()) or [None]
    return first, [p for p in rest if p is not None and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


def check_options(name: str, function: Method, options: Mapping[str, Any], where: str = "credit.options") -> None:
    """Raise ValueError for an option that the function does not have."""
    inputs = {*SIGNALS, *CONTEXT}
    known = [p.name for p in _signature(function)[1] if p.name not in inputs and p.default is not p.empty]
    for option in options:
        if option not in known:
            expected = f"one of {', '.join(known)}" if known else "none"
            raise ValueError(f"{where}: got {option!r}, but the options of {name!r} are: {expected}")


def _check_output(name: str, out_NT: Any, mask_NT: Tensor) -> None:
    if not isinstance(out_NT, Tensor) or out_NT.shape != mask_NT.shape:
        got = list(out_NT.shape) if isinstance(out_NT, Tensor) else type(out_NT).__name__
        raise ValueError(f"credit.method: {name!r} returned {got}, expected a tensor of shape {list(mask_NT.shape)}")
    wrong_NT = mask_NT & ~((out_NT >= 0) & out_NT.isfinite())
    if wrong_NT.any():
        row, position = wrong_NT.nonzero()[0].tolist()
        raise ValueError(
            f"credit.method: {name!r} gave {out_NT[row, position].item()} at row {row}, position {position}, "
            "expected finite weights >= 0"
        )
