"""`RowTracker`: which rows of a model's tables have changed since the last publication.

Every optimizer's step says so by the gradients that it has used, of any thread of the training, whoever computed them;
fused optimizers of torchrec say it by the ids that were looked up. What changes a table otherwise must be marked; if it
changes the table in place, it is found out, as tensors count such changes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from weightswap_exporter.modules.tensors import ModelView, extents, is_composed, is_fake, is_sharded, tie_key
from weightswap_runtime.errors import CheckpointError, Unsupported, listed
from weightswap_runtime.native import Offsets
from weightswap_runtime.staging.given import ChangedRows

from .row_updates import RowUpdates
from .torchrec_tables import ALTERNATIVE, changed_by_backward, sharded_tables

# of torchrec: their step is that of the optimizers within, which are told of, too
_WRAPPERS = {
    "CombinedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
    "GradientClippingOptimizer",
    "WarmupOptimizer",
}
Ids = torch.Tensor | Sequence[int] | np.ndarray[Any, Any]
_log = logging.getLogger("weightswap")


class RowTracker:
    """Knows which rows of a model's tables have changed since they were last published, or swapped in.

    For `publish(rows=tracker)`, or from memory: `Model.swap(model, rows=tracker)`, `Sender.send(model, rows=tracker)`.
    Each takes the rows, so each begins with all of the weights after another one, or with another server.

    model: the tables are the weights of its `nn.Embedding` and `nn.EmbeddingBag`, so also of torchrec's
      EmbeddingBagCollection and EmbeddingCollection; those that torchrec has sharded are known through torchrec's own
      tracker, which is created unless there is one with the consumer "weightswap".
    optimizers: those of the tables; others are found at their first step.
    tables: names of the parameters and buffers to track instead, as in `model.named_parameters()`. Everything else is
      compared with what was published last.
    row_local: classes of other optimizers that change only rows with a gradient.

    Raises Unsupported for an optimizer that changes other rows, too: by momentum, by Adam's moments on dense gradients,
    by weight decay, or by what it makes of zeros. The step of such an optimizer raises it before it changes anything,
    if the tracker was not told of it. Raises CheckpointError for names that are no tables, and for tables whose memory
    another tensor has.

    Memory: a byte for each row; from the first publication on, 6 % of the tables. It holds the model's tables.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        tables: Iterable[str] | None = None,
        row_local: Iterable[type[Optimizer]] = (),
    ) -> None:
        self._row_local = tuple(row_local)
        self._sharded = list(sharded_tables(model))
        sharded = {name for each in self._sharded for name in each.names}
        self._tables = _tables(model, tables, sharded)
        _check_backward(model, self._tables, sharded)
        self._by_id = {id(table.tensor): table for table in self._tables}
        self._names = {name: table for table in self._tables for name in table.names}
        self.updates = RowUpdates()
        self._lock = Lock()  # of what follows
        self._lent: Lent | None = None  # rows that were lent last, unless they are served or published
        self._base = ""  # the weights id since which all changes are known, or lent
        self._takings = 0  # each by what was served or published
        for optimizer in optimizers:
            for inner in _inner(optimizer):
                self._refuse(inner)
        self._listen(model)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables, each once."""
        return tuple(table.names[0] for table in self._tables)

    def mark(self, name: str, ids: Ids) -> None:
        """Say that rows of a table have been changed by something else than an optimizer's step.

        Call it after the change: it vouches that no other rows have changed since the last step. Raises CheckpointError
        for an unknown table, and for ids that are not its rows.
        """
        if (table := self._names.get(name)) is None:
            known = listed(sorted(self._names)) or "none"
            raise CheckpointError(f"mark: {name!r} is not a table of this tracker, which has {known}")
        try:
            rows = torch.as_tensor(ids).reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"mark: {name}: expected the numbers of rows ({error})") from error
        if rows.dtype not in (torch.int64, torch.int32) and rows.numel():
            raise CheckpointError(f"mark: {name}: expected integers, got {rows.dtype}")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < table.rows:
            raise CheckpointError(
                f"mark: {name} has the rows 0 to {table.rows - 1}, got {int(rows.min())} to {int(rows.max())}"
            )
        table.add(rows)
        table.leave()

    def changed(self) -> dict[str, Offsets]:
        """Return the ids of the rows, ascending, that have changed since the last publication or swap, by table."""
        self._collect()
        last = self._lent  # once: the thread of a publication may take it away
        lent = {rows.name: rows.ids for rows in last.rows} if last is not None else {}
        found = {table.names[0]: table.ids() for table in self._tables}
        return {name: np.union1d(ids, lent[name]) if name in lent else ids for name, ids in found.items()}

    def lend(self) -> Lent:
        """Return the rows that have changed, to be served or published. Those that are not are lent again."""
        with self._lock:
            base, takings = self._base, self._takings
            self._base, self._takings = "", takings + 1  # until all is there: an interrupt may lose rows
            lent, self._lent = self._lent, None
            for each in lent.rows if lent is not None else ():
                self._names[each.name].add(torch.from_numpy(each.ids))
            self._collect()
            unknown = [
                table.names[0]
                for table in self._tables
                if not table.is_known() or table.is_within or (lent is not None and table.names[0] in lent.unknown)
            ]
            rows = [ChangedRows(table.names[0], table.tensor, table.drain()) for table in self._tables]
            if unknown and base:
                _log.warning(
                    "%s changed otherwise than by an optimizer's step, or by one that has failed or not ended, so all "
                    "weights are given; RowTracker.mark() says which rows did",
                    ", ".join(unknown),
                )
            self._lent = Lent(self, rows, unknown, "" if unknown else base, takings)
            self._base, self._takings = base, takings
            return self._lent

    def _served(self, lent: Lent, weights_id: str) -> None:
        with self._lock:
            if lent.takings != self._takings:  # others have taken the rows, too
                return
            self._base, self._takings = weights_id, self._takings + 1
            if self._lent is lent:
                self._lent = None

    def _listen(self, model: nn.Module) -> None:
        """Be told of every optimizer's steps, and of lookups that change rows, as long as this tracker is there."""
        _be_told_of_steps(self)
        for module in model.modules():
            table = self._by_id.get(id(getattr(module, "weight", None)))
            if table is not None and getattr(module, "max_norm", None) is not None and _looks_up(module):
                for hook in table.watch_lookups(module):
                    weakref.finalize(self, hook.remove)

    def _before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self._refuse(optimizer)
        for table, _ in self._stepped(optimizer):
            table.begin(optimizer, has_closure=has_closure)

    def _after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        for table, group in self._stepped(optimizer):
            # torch changes a table once, and does not count its fused changes
            once = None if type(optimizer) in self._row_local else int(not group.get("fused"))
            is_seen = table.add_gradient()  # else a hook has cleared it, if the step has changed anything
            if is_seen:
                table.leave(most=once)
            table.end(optimizer, is_known=is_seen or once != 0)

    def _stepped(self, optimizer: Optimizer) -> Iterator[tuple[_Table, Mapping[str, Any]]]:
        """Yield the tables that an optimizer changes, with the options that it has for them."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (table := self._by_id.get(id(parameter))) is not None:
                    yield table, group

    def _refuse(self, optimizer: Optimizer) -> None:
        """Raise Unsupported if an optimizer changes rows that have no gradient."""
        if type(optimizer) in self._row_local:
            return
        problems = [
            f"{table.names[0]}: {problem}"
            for table, group in self._stepped(optimizer)
            if (problem := _spreads(optimizer, group, table.tensor.dtype))
        ]
        if problems:
            raise Unsupported(
                f"RowTracker: {listed(problems, between='; ')}, so that a tracker would miss them. {ALTERNATIVE}"
            )

    def _collect(self) -> None:
        """Add what is known elsewhere."""
        for sharded in self._sharded:
            for name, ids in sharded.drain():
                if (table := self._names.get(name)) is not None:
                    # fbgemm takes the row 0 for what is not in the table
                    table.add(ids.where((ids >= 0) & (ids < table.rows), 0))


_trackers: list[weakref.ref[RowTracker]] = []
_hooks: list[Any] = []
_changing = Lock()  # of both


def _be_told_of_steps(tracker: RowTracker) -> None:
    """Tell a tracker of each optimizer's steps from now on. torch's hooks are set once and stay: a step that is going
    through them fails if one is removed, by another thread or the garbage collector."""
    with _changing:
        _trackers[:] = [*(each for each in _trackers if each() is not None), weakref.ref(tracker)]
        if len(_hooks) < 1:
            _hooks.append(register_optimizer_step_pre_hook(partial(_tell, RowTracker._before_step)))
        if len(_hooks) < 2:  # an interrupt may have left the first alone
            _hooks.append(register_optimizer_step_post_hook(partial(_tell, RowTracker._after_step)))


def _tell(step: Callable[..., None], optimizer: Optimizer, args: tuple[Any, ...], options: Any) -> None:
    if _is_wrapper(optimizer):
        return
    for reference in _trackers.copy():  # others may come meanwhile
        if tracker := reference():
            step(tracker, optimizer, has_closure=len(args) > 1 or bool(options))


class Lent:
    """Rows for one swap, sending or publication: all that has changed in the tables since the weights `base`."""

    def __init__(
        self, tracker: RowTracker, rows: list[ChangedRows], unknown: list[str], base: str, takings: int
    ) -> None:
        """unknown: tables of which other rows may have changed; `base` is empty then."""
        self.rows, self.unknown, self.base, self.takings = rows, unknown, base, takings
        self._tracker = weakref.ref(tracker)  # no cycle: the collector would end it at any moment of a training

    def led_to(self, weights_id: str) -> None:
        """Say that the weights with these rows, and all else, are served or published."""
        if tracker := self._tracker():
            tracker._served(self, weights_id)


class _Table:
    """A tensor, and which of its rows have changed."""

    def __init__(self, names: tuple[str, ...], tensor: torch.Tensor) -> None:
        self.names, self.tensor = names, tensor
        self.rows = len(tensor)
        # a multiple of eight bytes, so that they are listed as words
        self._changed = torch.zeros(-(-self.rows // 8) * 8, dtype=torch.bool, device=tensor.device)
        self._version, self._memory = tensor._version, weakref.ref(tensor.untyped_storage())
        self._place = _place(tensor)  # in that memory
        self._is_known = True
        self._steps: set[weakref.ref[Optimizer]] = set()  # that have begun, and have not ended, or have failed
        self._has_begun_with_gradient = False

    def add(self, ids: torch.Tensor) -> None:
        self._changed.index_fill_(0, ids.detach().reshape(-1).to(self._changed.device, torch.int64), True)

    def add_gradient(self) -> bool:
        """Add the rows with a gradient. Return False if there are none."""
        gradient = self.tensor.grad
        if gradient is None:
            return False
        if gradient.is_sparse:
            ids = gradient._indices()[0]
            self.add(ids)
            return bool(ids.numel())
        rows = _bits(gradient.detach()).reshape(self.rows, -1).any(dim=1)
        self._changed[: self.rows].logical_or_(rows.to(self._changed.device))
        return not rows.is_cpu or bool(rows.any())  # a training on a device shall not wait for this

    def enter(self) -> None:
        """Call before a change that is accounted for."""
        self._is_known = self.is_known()

    def begin(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Call before a step. If one before has failed, it may have changed rows, which torch does not count if it is a
        fused one. has_closure: the step computes the gradient."""
        self._has_begun_with_gradient = has_closure or self.tensor.grad is not None
        self._is_known = self.is_known() and weakref.ref(optimizer) not in self._steps
        self._steps.add(weakref.ref(optimizer))

    def end(self, optimizer: Optimizer, *, is_known: bool) -> None:
        """Call after a step that has not failed. is_known: False if no gradient and no count says what it has done."""
        self._is_known = self._is_known and (is_known or not self._has_begun_with_gradient)
        self._steps.discard(weakref.ref(optimizer))

    @property
    def is_within(self) -> bool:
        """True from the begin of a step to its end, of which hooks and other threads may take rows; for good if it has
        failed."""
        return bool(self._steps)

    def leave(self, *, most: int | None = None) -> None:
        """Call after a change that is accounted for. most: changes in place that it consists of, if that is known: a
        hook that is called in between may add others."""
        if most is None or (self.tensor._version <= self._version + most and self._is_in_place()):
            self._version, self._memory = self.tensor._version, weakref.ref(self.tensor.untyped_storage())
            self._place = _place(self.tensor)

    def is_known(self) -> bool:
        """Return whether all changes were accounted for."""
        return self._is_known and self.tensor._version == self._version and self._is_in_place()

    def _is_in_place(self) -> bool:
        """Return False if the tensor has been given other memory, as by `half()` and `float()`, or another part of a
        buffer, which torch does not count either."""
        return self._memory() is self.tensor.untyped_storage() and self._place == _place(self.tensor)

    def watch_lookups(self, module: nn.Module) -> list[Any]:
        """Account for what lookups change: with `max_norm`, they scale rows."""

        def before(*_: object) -> None:
            if not torch.compiler.is_compiling():  # a graph is not of this table
                self.enter()

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: object) -> None:
            if not torch.compiler.is_compiling():
                self.add(args[0] if args else kwargs["input"])  # as other hooks have left them
                self.leave(most=1)

        return [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def ids(self) -> Offsets:
        """Return the rows, ascending."""
        if not self._changed.is_cpu:
            on_device: Offsets = self._changed.nonzero().reshape(-1).cpu().numpy()
            return on_device
        flags = self._changed.numpy()
        words = np.flatnonzero(flags.view(np.uint64) != 0)  # several times as fast as of the flags
        places = np.flatnonzero(flags.reshape(-1, 8)[words])
        rows: Offsets = words[places >> 3] * 8 + (places & 7)
        return rows

    def drain(self) -> Offsets:
        """Return the rows, and forget them and all other changes."""
        ids = self.ids()
        if self._changed.is_cpu:
            self._changed.numpy()[ids] = False  # mostly few of all
        else:
            self._changed.zero_()
        self._is_known = True
        self._steps.difference_update([step for step in self._steps.copy() if step() is None])
        self.leave()
        return ids


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _bits(gradient: torch.Tensor) -> torch.Tensor:
    """Return numbers as integers of the same bits, of which -0.0 is not zero: a step makes 0.0 of -0.0 by it."""
    if gradient.is_complex():
        return gradient
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[gradient.element_size()]
    return gradient.resolve_neg().view(integer)


def _looks_up(module: nn.Module) -> bool:
    """Return whether a module looks up the ids that it is called with: a class of the user's may compute others."""
    own = getattr(module.forward, "__func__", None)
    return own in (nn.Embedding.forward, nn.EmbeddingBag.forward)


def _tables(model: nn.Module, names: Iterable[str] | None, sharded: set[str]) -> list[_Table]:
    """Return the tables of a model. Raises CheckpointError."""
    whole = ModelView(model).whole
    if names is None:
        kinds = (nn.Embedding, nn.EmbeddingBag)
        modules = dict(model.named_modules(remove_duplicate=False))
        chosen = [name for name in whole if isinstance(modules.get(name.rpartition(".")[0]), kinds)]
        # names of parameters of a DistributedModelParallel are without its wrappers, those of modules are not
        beside = {id(module.weight) for module in modules.values() if isinstance(module, kinds)} if sharded else ()
        chosen = [name for name in whole if name in {*chosen, *sharded} or id(whole[name]) in beside]
    else:
        chosen = [names] if isinstance(names, str) else list(names)
    if not chosen:
        raise CheckpointError(
            "RowTracker: the model has no nn.Embedding or nn.EmbeddingBag; name its tables in tables="
        )
    if unknown := [name for name in chosen if name not in whole]:
        raise CheckpointError(f"RowTracker: the model has no {listed(unknown)}; it has {listed(list(whole))}")
    if odd := [name for name in chosen if not _is_table(whole[name])]:
        raise CheckpointError(
            f"RowTracker: {listed(odd)}: no dense table with rows and values; leave it out of tables="
        )
    spans = extents(whole)
    if apart := [text for name in chosen if (text := _tied_apart(name, whole, spans))]:
        raise CheckpointError(
            f"RowTracker: {listed(apart, between='; ')}, so that a step of one changes the other unnoticed. Tie them "
            "by the same object (head.weight = table.weight), or leave the table out of RowTracker(tables=)"
        )
    groups: dict[object, list[str]] = {tie_key(whole[name]): [] for name in chosen}
    for name in [*chosen, *(name for name in whole if name not in chosen)]:
        if (tied := groups.get(tie_key(whole[name]))) is not None:
            tied.append(name)
    return [_Table(tuple(tied), whole[tied[0]]) for tied in groups.values()]


def _check_backward(model: nn.Module, tables: Iterable[_Table], sharded: set[str]) -> None:
    """Raise Unsupported for tables that a backward pass changes, which neither torch nor torchrec's tracker tells."""
    changed = changed_by_backward(model)
    if odd := [table.names[0] for table in tables if id(table.tensor) in changed and sharded.isdisjoint(table.names)]:
        raise Unsupported(
            f"RowTracker: {listed(odd)}: changed by a backward pass with a fused optimizer, of which nothing tells the "
            "rows. Train it as DistributedModelParallel shards it; or leave it out of RowTracker(tables=): it is then "
            "compared with what was published last, and written whole if it has changed"
        )


def _is_table(tensor: torch.Tensor) -> bool:
    odd = is_composed(tensor) or is_sharded(tensor) or is_fake(tensor) or tensor.layout != torch.strided
    return not odd and tensor.dim() > 0 and tensor.numel() > 0


def _tied_apart(name: str, whole: Mapping[str, torch.Tensor], spans: Mapping[str, tuple[int, int, int]]) -> str:
    """Return which other tensors have some of a table's memory, of which torch may count changes apart; else empty."""
    storage, begin, end = spans[name]
    shared = [
        other
        for other, (its, low, high) in spans.items()
        if its == storage and low < end and begin < high and whole[other] is not whole[name]
    ]
    return f"{name} has memory of {listed(shared)}, which is another tensor" if shared else ""


def _inner(optimizer: Any) -> Iterator[Optimizer]:
    """Yield the optimizers that step: those within torchrec's and accelerate's wrappers."""
    if not isinstance(optimizer, Optimizer):
        raise CheckpointError(f"RowTracker: expected an optimizer, got a {type(optimizer).__qualname__}")
    within = [each for _, each in getattr(optimizer, "optimizers", ())]  # torchrec's CombinedOptimizer
    wrapped = [getattr(optimizer, name, None) for name in ("_optimizer", "optimizer")]
    within += [each for each in wrapped if isinstance(each, Optimizer)]
    for each in within:
        yield from _inner(each)
    if not within:
        yield optimizer


def _is_wrapper(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__name__ in _WRAPPERS and kind.__module__.startswith("torchrec.optim.")


def _spreads(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Return why an optimizer changes rows without a gradient in a table of this dtype; empty if it does not."""
    kind = type(optimizer)
    name = kind.__name__
    if kind is torch.optim.SparseAdam:
        return ""
    if group.get("weight_decay"):
        return f"the weight decay of {name} changes all rows at each step"
    if kind is torch.optim.SGD and group.get("momentum"):
        return "the momentum of SGD keeps changing rows in steps in which they have no gradient"
    if kind in (torch.optim.SGD, torch.optim.Adagrad):
        return _spreads_zeros(name, group, dtype)
    if "betas" in group or group.get("momentum"):
        return f"the moments of {name} keep changing rows in steps in which they have no gradient"
    return f"{name} may change rows that have no gradient (RowTracker(row_local=[{name}]) says that it does not)"


def _spreads_zeros(name: str, group: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Return why an optimizer makes something else than nothing of a gradient that is zero; empty if it does not."""
    if group.get("maximize"):
        return (
            f"{name} with maximize=True makes 0.0 of each -0.0 in rows that have no gradient (negate the loss instead)"
        )
    if dtype.is_complex:
        return f"{name} makes 0.0 of each -0.0 in rows of {dtype} that have no gradient"
    lr = group.get("lr", 0.0)
    on_device = isinstance(lr, torch.Tensor) and not lr.is_cpu  # a training on a device shall not wait for this
    if not on_device and not 0 <= float(lr) <= torch.finfo(torch.float32).max:
        return f"{name} with lr={float(lr)} changes rows that have no gradient (it has to be finite, from 0 on)"
    if name == "Adagrad":
        least = torch.finfo(dtype if dtype.is_floating_point else torch.float32).tiny
        if not group.get("eps", 0) >= least:
            return (
                f"Adagrad with eps={group.get('eps')} makes NaN of rows that have had no gradient (in a table of "
                f"{dtype} it has to be {least:.2g} or more)"
            )
    return ""
