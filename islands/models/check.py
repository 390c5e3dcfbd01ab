"""The loss of a model on windows of tokens, and a trial of a model before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from islands.errors import InputError
from islands.plugins import one_line


def window_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean next-token cross-entropy, in nats: a scalar.

    A model with a method ``loss(tokens)`` is asked for its own instead.

    Args:
        tokens: (batch, window + 1) int64; position i predicts position i + 1.
    """
    own = _own_loss(model)
    if own is not None:
        return cast(Tensor, own(tokens))
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _own_loss(model: nn.Module) -> Callable[[Tensor], object] | None:
    """The model's method ``loss``; a loss *module* kept under that name is a part, not a method."""
    own = getattr(model, "loss", None)
    return own if callable(own) and not isinstance(own, nn.Module) else None


def check_model(model: nn.Module, tokens: Tensor, vocab_size: int | None = None) -> tuple[str, ...]:
    """Try one training-mode forward pass; leave model and torch's random state as they were.

    Args:
        tokens: (batch, window + 1) int64.
        vocab_size: logits needed per position; None: as many as ``tokens`` shows.

    Returns:
        Names of the persistent buffers that the pass changed, such as BatchNorm's statistics.

    Raises:
        InputError: nothing to train, the pass fails, or logits or loss have the wrong shape.
    """
    must_have_shapes(model)
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise InputError("model: has no parameters that require a gradient")
    persistent = model.state_dict(keep_vars=True)
    gpus = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with (
        torch.random.fork_rng(gpus),
        _untouched(model) as before,
    ):
        model.train()
        _try_forward(model, tokens, vocab_size or int(tokens.max()) + 1)
        return tuple(
            name
            for name, buffer in model.named_buffers()
            if name in persistent and not torch.equal(buffer, before[name])
        )


def must_have_shapes(model: nn.Module) -> None:
    """Raise InputError for a lazy model that has not seen an input yet."""
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise InputError("model: has parameters without shapes; run a forward pass in build")


def _try_forward(model: nn.Module, tokens: Tensor, vocab_size: int) -> None:
    batch, window = tokens.shape[0], tokens.shape[1] - 1
    own = _own_loss(model)
    try:
        output = own(tokens) if own else model(tokens[:, :-1])
    except Exception as error:
        what = "its loss" if own else "its forward pass"
        raise InputError(
            f"model: {what} fails on {batch} windows of {window} tokens: {one_line(error)}"
        ) from error
    if not isinstance(output, Tensor):
        what = "loss" if own else "forward"
        raise InputError(
            f"model: {what} must return a tensor, but returned {type(output).__name__}"
        )
    shape = tuple(output.shape)
    if own:
        if shape != ():
            raise InputError(f"model: loss must be a scalar, but has shape {shape}")
    elif len(shape) != 3 or shape[:2] != (batch, window) or shape[2] < vocab_size:
        raise InputError(
            f"model: logits have shape {shape}, but must have (batch, window, vocabulary) = "
            f"({batch}, {window}, {vocab_size} or more)"
        )
    if not output.requires_grad:
        what = "loss has" if own else "logits have"
        raise InputError(f"model: its {what} no gradient with respect to the parameters")


@contextmanager
def _untouched(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Put parameters, buffers and modes back afterwards; yields copies of all tensors by name."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        yield copies
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(copies[name])
        for name, buffer in buffers.items():  # a forward may have put a new tensor in its place
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffer
        for module, training in modes:
            module.training = training
