"""Which datasets are known to draw nothing, by their code. What is not known is seeded before each sample."""

from __future__ import annotations

import gc
import linecache
import random
import sys
import types
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

import lockstep.data.source
from lockstep.data import DataLoader
from lockstep.data.drawing import only_looks_up
from lockstep.data.source import is_deterministic


class Held(Dataset):
    """What most of the datasets below hold."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.images = torch.arange(float(length * 2)).view(length, 2)
        self.labels = np.arange(length)
        self.names = [f"sample {index}" for index in range(length)]
        self.rows = [{"x": index} for index in range(length)]
        self.by_index = dict(enumerate(self.names))
        self.transform = None
        self.scale = 255.0

    def __len__(self) -> int:
        return self.length


class Pairs(Held):
    def __getitem__(self, index):
        """A pair.

        In a docstring of several lines, which a class indents.
        """
        return self.images[index], self.labels[index]


class Steps(Held):
    def __getitem__(self, i):
        image = self.images[i] / self.scale - 0.5
        if self.transform is not None:
            image = self.transform(image)
        label = int(self.labels[i])
        return {"image": image, "label": label, "name": self.names[i]}


class Made(Held):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)], dtype=torch.float64)


class Converted(Held):
    def __getitem__(self, index):
        return torch.from_numpy(np.asarray(self.labels[index : index + 1], dtype=np.float32)).float(), len(self.images)


class Rows(Held):
    def __getitem__(self, index):
        return self.rows[index], self.by_index[index], self.scale


class Windows(Held):
    def __getitem__(self, index):
        start = index * 2 % (self.length - 1)
        return self.images[start : start + 2], -index if index > 3 else index


@pytest.mark.parametrize("kind", [Pairs, Steps, Made, Converted, Rows, Windows])
def test_lookups_are_known(kind) -> None:
    assert only_looks_up(kind(), [0, 3])


class Draws(Held):
    def __getitem__(self, index):
        return self.images[index] + torch.rand(2)


class DrawsByMethod(Held):
    def __getitem__(self, index):
        return self.images[index].bernoulli()


class DrawsInPlace(Held):
    def __getitem__(self, index):
        return self.images[index].clone().uniform_()


class DrawsByArgument(Held):
    def __getitem__(self, index):
        return torch.tensor(random.random())


class DrawsInTheIndex(Held):
    def __getitem__(self, index):
        return self.images[random.randrange(8)]


class DrawsInAFunction(Held):
    def __getitem__(self, index):
        return self.helper(index)

    def helper(self, index):
        return torch.rand(1)


class DrawsInAProperty(Held):
    @property
    def noisy(self):
        return torch.rand(8)

    def __getitem__(self, index):
        return self.noisy[index]


class DrawsInAPropertyOfAnAttributesName(Held):
    images = property(lambda self: torch.rand(8), lambda self, value: vars(self).update(images=value))

    def __getitem__(self, index):
        return self.images[index]


class DrawsInGetattr(Held):
    def __getattr__(self, name):
        return torch.rand(1)

    def __getitem__(self, index):
        return self.noise, index


class DrawsWhenIndexed(Held):
    """The rows of a list may be anything."""

    def __getitem__(self, index):
        return self.rows[index]["x"]


class DrawsWhenAdded(Held):
    def __getitem__(self, index):
        row = self.rows[index]
        return row + 1


class DrawsWithinALoop(Held):
    def __getitem__(self, index):
        return [torch.rand(1) for _ in range(index)]


class DrawsElsewhere(Held):
    def __getattribute__(self, name):
        return super().__getattribute__(name)

    def __getitem__(self, index):
        return self.images[index]


class HasADefault(Held):
    def __getitem__(self, index, noise=torch.rand(1)):  # noqa: B008  # as users write it
        return self.images[index]


class Assigns(Held):
    def __getitem__(self, index):
        self.images = torch.rand(8)
        return index


def decorated(function):
    return lambda self, index: function(self, index) + torch.rand(2)


class IsDecorated(Held):
    @decorated
    def __getitem__(self, index):
        return self.images[index]


tensor = types.SimpleNamespace(tensor=lambda value: torch.rand(1))


class CallsAnotherModule(Held):
    def __getitem__(self, index):
        return tensor.tensor(index)


class IsC(list):
    pass


@pytest.mark.parametrize(
    "kind",
    [
        *(Draws, DrawsByMethod, DrawsInPlace, DrawsByArgument, DrawsInTheIndex, DrawsInAFunction, DrawsInAProperty),
        *(DrawsInAPropertyOfAnAttributesName, DrawsInGetattr),
        *(DrawsWhenIndexed, DrawsWhenAdded, DrawsWithinALoop, DrawsElsewhere, HasADefault, Assigns, IsDecorated),
        *(CallsAnotherModule, lambda: IsC(range(8))),
    ],
)
def test_what_may_draw_is_not_known(kind) -> None:
    assert not only_looks_up(kind(), [0, 3])


class Indexable:
    def __getitem__(self, index):
        return torch.rand(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images", Indexable()),
        ("images", torch.nn.Parameter(torch.zeros(8, 2)).as_subclass(type("Noisy", (torch.Tensor,), {}))),
        ("labels", np.array([Indexable()] * 8, dtype=object)),
        ("labels", [Indexable()] * 8),
        ("transform", lambda image: image + torch.rand(2)),
        ("scale", Indexable()),
        ("names", Indexable()),
    ],
)
def test_what_a_dataset_holds_is_looked_at_for_each_batch(name, value) -> None:
    dataset = Steps()
    assert only_looks_up(dataset, [1])
    setattr(dataset, name, value)
    assert not only_looks_up(dataset, [1])


def test_attributes_may_be_missing() -> None:
    dataset = Steps()
    del dataset.transform
    assert not only_looks_up(dataset, [1])


def test_indices_are_plain_numbers() -> None:
    assert not only_looks_up(Pairs(), [0, Indexable()])
    assert not only_looks_up(Pairs(), ["a"])


def test_another_getitem_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only_looks_up(Pairs(), [0])
    monkeypatch.setattr(Pairs, "__getitem__", Draws.__getitem__)
    assert not only_looks_up(Pairs(), [0])


def test_builtins_of_another_meaning_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shadowed(Held):
        def __getitem__(self, index):
            return abs(index)

    monkeypatch.setitem(globals(), "abs", lambda value: random.random())
    assert not only_looks_up(Shadowed(), [0])


def test_a_file_that_changed_after_its_import_is_not_believed(tmp_path) -> None:
    path = tmp_path / "dataset.py"
    text = "class Dataset:\n def __init__(self):\n  self.x = [1]\n def __getitem__(self, index):\n  {}\n"
    for written, is_known in (("return self.x[index]", True), ("return self.x[0]", False)):
        path.write_text(text.format("return self.x[index]"))
        names: dict = {"__name__": "dataset"}
        exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), names)
        path.write_text(text.format(written))
        linecache.checkcache()
        assert only_looks_up(names["Dataset"](), [0]) == is_known


def count_seedings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seeded: list[int] = []
    monkeypatch.setattr(lockstep.data.source, "seed_global_rngs", seeded.append)
    return seeded


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: Subset(one, range(8)), lambda one: ConcatDataset([one])])
def test_lookups_are_not_seeded(monkeypatch: pytest.MonkeyPatch, wrap) -> None:
    seeded = count_seedings(monkeypatch)
    assert [len(batch[1]) for batch in DataLoader(wrap(Pairs()), 4)] == [4, 4]
    assert not seeded
    list(DataLoader(wrap(Draws()), 4))
    assert len(seeded) == 8


def test_a_transform_set_in_the_middle_of_an_epoch_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Steps()
    seeded = count_seedings(monkeypatch)
    for step, _ in enumerate(DataLoader(dataset, 2)):
        if step == 1:
            dataset.transform = torch.clone
    assert len(seeded) == 4


# ---- what changes behind the reader's back ------------------------------------------------------------


def test_new_code_in_the_same_function_is_read_anew() -> None:
    """As notebooks reload a module."""

    class Reloaded(Held):
        def __getitem__(self, index):
            return self.images[index]

    assert only_looks_up(Reloaded(), [0])
    Reloaded.__getitem__.__code__ = Draws.__getitem__.__code__
    assert not only_looks_up(Reloaded(), [0])


def test_class_and_names_are_looked_at_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(Held):
        def __getitem__(self, index):
            return self.images[index], float(index)

    dataset = Changed()
    assert only_looks_up(dataset, [0])
    with monkeypatch.context() as patched:
        patched.setattr(Changed, "images", property(lambda self: torch.rand(8)), raising=False)
        assert not only_looks_up(dataset, [0])
    with monkeypatch.context() as patched:
        patched.setattr(Changed, "__getattribute__", lambda self, name: torch.rand(8))
        assert not only_looks_up(dataset, [0])
    with monkeypatch.context() as patched:
        patched.setitem(globals(), "float", lambda value: torch.rand(1))
        assert not only_looks_up(dataset, [0])
    assert only_looks_up(dataset, [0])


def test_a_tensor_with_a_method_of_its_own_is_not_plain() -> None:
    dataset = Pairs()
    dataset.images.__getitem__ = lambda index: torch.rand(1)
    assert not only_looks_up(dataset, [0])


def test_names_of_an_enclosing_function_are_not_known() -> None:
    def float(value):
        return torch.rand(1)

    class Enclosed(Held):
        def __getitem__(self, index):
            return float(index)

    assert not only_looks_up(Enclosed(), [0])


class EqualsEverything(type):
    def __eq__(cls, other):
        return True

    __hash__ = type.__hash__


def test_a_class_that_equals_others_is_not_one_of_them() -> None:
    dataset = Pairs()
    dataset.images = EqualsEverything("Noise", (), {"__getitem__": lambda self, index: torch.rand(1)})()
    assert not only_looks_up(dataset, [0])


def load(path, body: str):
    """A dataset of which a file has the code."""
    path.write_text(f"class Dataset:\n def __getitem__(self, index):\n{body}  return x\n")
    names: dict = {"__name__": "dataset"}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), names)
    return names["Dataset"]()


def test_each_name_is_read_once(tmp_path) -> None:
    """Not as often as names stand for it: 2^60 times."""
    assert only_looks_up(load(tmp_path / "dataset.py", "  x = index\n" + "  x = x * x + 1\n" * 60), [0])


def test_code_is_read_deep_in_a_stack(tmp_path) -> None:
    dataset = load(tmp_path / "dataset.py", f"  x = {' + '.join(['1'] * 800)}\n")

    def ask(depth: int) -> bool:
        return only_looks_up(dataset, [0]) if depth == 0 else ask(depth - 1)

    assert not ask(sys.getrecursionlimit() - 300)


def test_modules_that_load_lazily_stay_asleep(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise ModuleNotFoundError("not installed")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    assert only_looks_up(load(tmp_path / "dataset.py", "  x = index\n"), [0])


def test_nothing_keeps_a_dataset_alive() -> None:
    def make() -> tuple[Dataset, weakref.ref]:
        class Big:
            pass

        big = Big()

        class Closes(Held):
            def __getitem__(self, index):
                return big, self.images[index]

        return Closes(), weakref.ref(big)

    dataset, big = make()
    next(iter(DataLoader(dataset, 2, collate_fn=list)))
    del dataset
    gc.collect()
    assert big() is None


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __get__(self, dataset, kind):
        return self

    def __call__(self, index):
        return torch.tensor(float(index))


def test_a_getitem_without_a_hash() -> None:
    dataset = type("Called", (Dataset,), {"__getitem__": Unhashable(), "__len__": lambda self: 4})()
    assert [batch.tolist() for batch in DataLoader(dataset, 2)] == [[0, 1], [2, 3]]


# ---- torch's wrappers -------------------------------------------------------------------------------


class Bootstrap(list):
    """A sequence that draws."""

    def __getitem__(self, index):
        return random.randrange(8)


class DrawsItsIndices(Subset):
    indices = property(lambda self: [random.randrange(8)] * 8, lambda self, value: None)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(Pairs(), Bootstrap(range(8))),
        DrawsItsIndices(Pairs(), range(8)),
        TensorDataset(torch.arange(8.0).as_subclass(type("Noisy", (torch.Tensor,), {}))),
        Subset(Subset(Draws(), range(8)), range(8)),
        ConcatDataset([Pairs(), Draws()]),
        StackDataset(Pairs(), Draws()),
    ],
)
def test_what_a_wrapper_holds_may_draw(dataset) -> None:
    assert not is_deterministic(dataset, [5, len(dataset) - 1])


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(Pairs(), np.arange(8)),
        Subset(ConcatDataset([Pairs(), Subset(Pairs(), [3])]), range(9)),
        StackDataset(Pairs(), Rows()),
        TensorDataset(torch.arange(8.0)),
        ConcatDataset([Pairs(), Pairs()]),
    ],
)
def test_wrappers_of_lookups_are_known(dataset) -> None:
    assert is_deterministic(dataset, [0, -1, len(dataset) - 1])


def test_only_the_parts_that_indices_lie_in_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(
        lockstep.data.source, "only_looks_up", lambda part, indices: bool(asked.append(indices)) or True
    )
    assert is_deterministic(ConcatDataset([Pairs() for _ in range(100)]), [3, 8, 9, -1])
    assert asked == [[3], [0, 1], [7]]


def test_an_inner_dataset_that_is_replaced_in_an_epoch_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Subset(TensorDataset(torch.arange(8.0)), range(8))
    seeded = count_seedings(monkeypatch)
    for step, _ in enumerate(DataLoader(dataset, 2)):
        if step == 1:
            dataset.dataset = Draws()
    assert len(seeded) == 4


class LazyRow(Mapping):
    """Draws when it is looked into, as the default collate does."""

    def __getitem__(self, name):
        return torch.rand(1)

    def __iter__(self):
        return iter(["x"])

    def __len__(self):
        return 1


def test_rows_with_code_of_their_own_are_collated_seeded() -> None:
    dataset = Rows()
    dataset.rows = [LazyRow() for _ in range(8)]
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn.append([batch[0]["x"].item() for batch in DataLoader(dataset, 1)])
        assert torch.initial_seed() == seed
    assert drawn[0] == drawn[1]
