"""The public functions as operators of ``torch.compile``: opaque to it, they do in graphs what they do without."""

from __future__ import annotations

import array
import ast
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from .parallel import dtensor
from .parallel.shard import SHARDS, VocabShard

_F = TypeVar("_F", bound=Callable[..., Any])


class _Operator(NamedTuple):
    """``empty`` makes tensors like those that ``function`` returns, of the same arguments."""

    function: Callable[..., Any]
    empty: Callable[..., list[torch.Tensor]]


class _Recorded(NamedTuple):
    """What a forward leaves for its backward."""

    outputs: list[torch.Tensor]
    leaves: list[torch.Tensor]


_operators: dict[str, _Operator] = {}
_recorded: dict[int, _Recorded] = {}
_numbers = itertools.count()

# an argument travels in the list of its type, under its name; whether a tensor requires grad beside it
_SCHEMA = (
    "str name, str[] names, Tensor[] tensors, bool[] needs, str[] int_names, SymInt[] ints, str[] float_names, "
    "float[] floats, str[] word_names, str[] words"
)
# of this copy of the package: there may be another under another name
_library = torch.library.Library(__name__.replace(".", "_"), "DEF")
_FORWARD = f"{_library.ns}::{_library.define(f'forward({_SCHEMA}) -> Tensor[]')}"
_BACKWARD = f"{_library.ns}::{_library.define(f'backward(Tensor record, Tensor?[] grads, {_SCHEMA}) -> Tensor[]')}"


def operator(
    empty: Callable[..., list[torch.Tensor]], pack: Callable[[list[torch.Tensor]], Any] | None = None
) -> Callable[[_F], _F]:
    """Makes a function one operator inside of ``torch.compile``; outside it is as it was. ``pack`` makes what the
    function returns of the tensors in it."""

    def decorate(function: _F) -> _F:
        name, parameters = function.__name__, tuple(inspect.signature(function).parameters)
        _operators[name] = _Operator(function, empty)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return _run(function, *args, **kwargs)
            outputs = _traced(name, {**dict(zip(parameters[: len(args)], args, strict=True)), **kwargs})
            return outputs[0] if pack is None else pack(outputs)

        return call  # type: ignore[return-value]

    return decorate


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function, on the device of its first tensor: kernels start on the current one."""
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    if first is None or first.device.type != "cuda":
        return function(*args, **kwargs)
    with torch.cuda.device(first.device):
        return function(*args, **kwargs)


def _traced(name: str, given: dict[str, Any]) -> list[torch.Tensor]:
    """The call as ``torch.compile`` sees it."""
    tensors: dict[str, torch.Tensor] = {}
    ints: dict[str, int] = {}
    floats: dict[str, float] = {}
    words: dict[str, str] = {}
    for key, value in given.items():
        # a pair of tensors, by their places
        for part, item in enumerate(value) if isinstance(value, tuple) else ((None, value),):
            path = key if part is None else f"{key}.{part}"
            if isinstance(item, torch.Tensor):
                if dtensor.any_dtensor(item):
                    raise TypeError(f"{path} is a DTensor: in torch.compile pass {path}.to_local() and a shard")
                tensors[path] = item
            elif isinstance(item, VocabShard):
                words[path] = item.key
            elif isinstance(item, float):
                floats[path] = item
            elif isinstance(item, int) and not isinstance(item, bool):
                ints[path] = item
            else:
                words[path] = repr(item)
    first = next(iter(tensors.values()))
    if torch.is_autocast_enabled(first.device.type):
        words["autocast"] = str(torch.get_autocast_dtype(first.device.type))
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors.values()]
    *outputs, _ = getattr(torch.ops, _library.ns).forward(
        name, list(tensors), list(tensors.values()), needs, list(ints), list(ints.values()), list(floats),
        list(floats.values()), list(words), list(words.values()),
    )  # fmt: skip
    return outputs


class _Call:
    """An operator's arguments as its function takes them."""

    def __init__(self, name: str, names: Sequence[str], tensors: Sequence[torch.Tensor], *others: Any) -> None:
        self.operator = _operators[name]
        self.arguments: dict[str, Any] = {}
        self.autocast: torch.dtype | None = None
        for key, value in zip(names, tensors, strict=True):
            key, _, part = key.partition(".")
            if part:
                self.arguments[key] = (*self.arguments.get(key, ()), value)
            else:
                self.arguments[key] = value
        _, int_names, ints, float_names, floats, word_names, words = others
        self.arguments.update(zip(int_names, ints, strict=True))
        self.arguments.update(zip(float_names, floats, strict=True))
        for key, word in zip(word_names, words, strict=True):
            if key == "autocast":
                self.autocast = getattr(torch, word.removeprefix("torch."))
            elif word in SHARDS:
                self.arguments[key] = SHARDS[word]
            else:
                self.arguments[key] = ast.literal_eval(word)
        self.device = tensors[0].device

    def __call__(self) -> list[torch.Tensor]:
        cast = nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)
        with cast:
            return list(_flat(_run(self.operator.function, **self.arguments)))

    def empty(self) -> list[torch.Tensor]:
        return self.operator.empty(**self.arguments)


def _flat(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result:
            yield from _flat(part)


@torch.library.impl(_library, "forward", "CompositeExplicitAutograd")
def _run_forward(name: str, names: list[str], tensors: list[torch.Tensor], needs: list[bool], *others: Any) -> Any:
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
    outputs = _recording(_Call(name, names, leaves, needs, *others), any(needs))
    key = next(_numbers)
    # backward finds what is recorded by the number in a tensor, whose memory, this array, dies with its last copy
    place = array.array("q", [key])
    if any(needs):
        _recorded[key] = _Recorded(outputs, [x for x in leaves if x.requires_grad])
        weakref.finalize(place, _recorded.pop, key, None)
    return [*(x.detach() for x in outputs), torch.frombuffer(place, dtype=torch.int64)]


def _recording(call: _Call, needed: bool) -> list[torch.Tensor]:
    """Runs a call so that autograd records it, which operators run without."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.set_grad_enabled(needed):
        return call()


@torch.library.impl(_library, "backward", "CompositeExplicitAutograd")
def _run_backward(record: torch.Tensor, grads: list[torch.Tensor | None], *arguments: Any) -> list[torch.Tensor]:
    recorded = _recorded.pop(int(record), None)
    if recorded is None:
        # a second backward of one forward
        *_, again = _run_forward(*arguments)
        recorded = _recorded.pop(int(again))
    used = [(x, g) for x, g in zip(recorded.outputs, grads, strict=True) if g is not None and x.requires_grad]
    found: Iterable[torch.Tensor | None] = [None] * len(recorded.leaves)
    if used:
        outputs, upstream = zip(*used, strict=True)
        found = torch.autograd.grad(outputs, recorded.leaves, upstream, allow_unused=True)
    return [
        torch.zeros_like(x, memory_format=torch.contiguous_format) if grad is None else grad.contiguous()
        for x, grad in zip(recorded.leaves, found, strict=True)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    name, names, tensors, *others = inputs
    ctx.save_for_backward(output[-1], *tensors)
    ctx.arguments = name, names, others


def _of_forward(backward: _F) -> _F:
    torch.library.register_autograd(_FORWARD, backward, setup_context=_save, lib=_library)
    return backward


@_of_forward
def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    record, *tensors = ctx.saved_tensors
    name, names, others = ctx.arguments
    needs = others[0]
    run = getattr(torch.ops, _library.ns).backward
    found = iter(run(record, grads[:-1], name, names, tensors, *others)) if any(needs) else iter(())
    # torch takes an empty list for one of tensors
    return None, None, [next(found) if need else None for need in needs], *(None if x else [] for x in others)


@torch.library.register_fake(_FORWARD, lib=_library)
def _empty_forward(*arguments: Any) -> list[torch.Tensor]:
    return [*_Call(*arguments).empty(), torch.empty(1, dtype=torch.int64)]


@torch.library.register_fake(_BACKWARD, lib=_library)
def _empty_backward(
    record: torch.Tensor, grads: Any, name: str, names: Any, tensors: Any, needs: Any, *others: Any
) -> Any:
    return [x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=True) if need]
