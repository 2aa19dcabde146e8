"""The parts of the ImageNet program that need no data: options, who starts what, networks, learning rates."""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import itertools
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import env
from lockstep.commands import train as train_command
from lockstep.errors import InputError, LaunchError, SetupError
from lockstep.launch.config import LaunchConfig
from lockstep.recipes import imagenet
from lockstep.recipes import options as shared_options
from lockstep.recipes.imagenet import models
from lockstep.recipes.imagenet.broken import BrokenImages
from lockstep.recipes.imagenet.models import check_size, create_model
from lockstep.recipes.imagenet.options import ImagenetConfig, resolve_config
from lockstep.recipes.imagenet.schedule import RateSchedule, describe_rate, full_rate, rate_of_step
from lockstep.recipes.imagenet.starting import Start, choose_strategy, meeting_url
from lockstep.testing import limit_s

# As a document of the field prints them, behind the program's name.
ONE_NODE = (
    "-a resnet50 --dist-url tcp://127.0.0.1:FREEPORT --dist-backend nccl --multiprocessing-distributed --world-size 1 "
    "--rank 0 DIR"
)
TWO_NODES = (
    "-a resnet50 --dist-url tcp://IP_OF_NODE0:FREEPORT --dist-backend nccl --multiprocessing-distributed "
    "--world-size 2 --rank 1 DIR"
)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    imagenet.add_arguments(parser)
    return parser.parse_args(words)


class TestOptions:
    def test_they_are_there_without_torch(self) -> None:
        code = (
            "import argparse, sys; from lockstep.recipes import imagenet; p = argparse.ArgumentParser(); "
            "imagenet.add_arguments(p); imagenet.start(p.parse_args(['DIR']), 2); assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=limit_s(60))

    def test_all_of_the_reference_example_in_one_call(self) -> None:
        words = (
            "-a resnet18 -j 3 --epochs 5 -b 64 --lr 0.2 --momentum 0.8 --wd 0.001 -p 7 --pretrained --seed 4 --gpu 0 "
            "--dist-url tcp://h:1 --dist-backend gloo --world-size 2 --rank 1 --dummy -e --start-epoch 2 --no-accel "
            "--multiprocessing-distributed DIR --resume"
        )
        options = parse(*words.split(), "")
        assert resolve_config(options) == ImagenetConfig(
            arch="resnet18", epochs=5, batch_size=64, lr=0.2, momentum=0.8, weight_decay=0.001, seed=4, pretrained=True,
            dummy=True,
        )  # fmt: skip
        assert (options.workers, options.print_freq, options.gpu, options.backend) == (3, 7, 0, "gloo")
        assert (options.world_size, options.rank, options.dist_url) == (2, 1, "tcp://h:1")
        assert options.evaluate
        assert options.no_accel
        assert (options.start_epoch, options.resume, choose_strategy(options)) == (2, None, "spawn")
        words = "--arch tiny --workers 0 --batch-size 8 --learning-rate 0.5 --weight-decay 0.1 --print-freq 2 DIR"
        assert resolve_config(parse(*words.split())) == ImagenetConfig(
            arch="tiny", batch_size=8, lr=0.5, weight_decay=0.1
        )
        assert resolve_config(parse("DIR")) == ImagenetConfig()

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("-b", "0"), "0 is too small; expected 1 or more"),
            (("--wd", "-1"), "-1 is out of range; expected 0 or more"),
            (("--lr", "inf"), "inf is out of range"),
            (("--precision", "fp8"), "invalid choice: 'fp8'"),
            (("--strategy", "zero"), "invalid choice: 'zero'"),
            (("--resume", "nowhere"), "'nowhere' does not exist"),
        ],
    )
    def test_a_bad_value_says_what_to_give(self, words: tuple[str, ...], said: str) -> None:
        with pytest.raises(argparse.ArgumentError, match=said):
            parse("DIR", *words)

    def test_without_a_folder(self) -> None:
        with pytest.raises(InputError, match="lockstep data make-imagenet"):
            resolve_config(parse())

    def test_a_resumed_run_may_change_how_long_and_how_fast(self) -> None:
        saved = ImagenetConfig(arch="tiny", epochs=2, pretrained=True).as_dict()
        changed = resolve_config(parse("DIR", "--epochs", "9", "--lr", "1", "--schedule", "cosine"), saved)
        assert changed == ImagenetConfig(arch="tiny", epochs=9, lr=1, schedule="cosine", pretrained=True)
        for words in (("-b", "8"), ("--precision", "fp64"), ("--sync-bn",), ("--size", "32")):
            with pytest.raises(InputError, match=r"leave --[a-z-]+ out to resume it"):
                resolve_config(parse("DIR", *words), saved)

    def test_missing_packages_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared_options, "find_spec", lambda name: None if name == "PIL" else object())
        with pytest.raises(SetupError, match=r"imagenet recipe needs Pillow.*pip install pillow"):
            parse("DIR")


class TestStarting:
    @pytest.mark.parametrize(
        ("words", "strategy", "start"),
        [
            ("DIR", "ddp", Start("4")),
            ("DIR --strategy apex", "apex", Start("4")),
            ("DIR --strategy horovod", "horovod", Start("4")),
            ("DIR --strategy single", "single", Start(1)),
            ("DIR --gpu 0", "single", Start(1)),
            ("DIR --strategy dp", "dp", Start(1, ("--processes", "4"))),
            ("DIR --strategy spawn", "spawn", Start(1, ("--processes", "4"))),
            (ONE_NODE, "spawn", Start(1, ("--processes", "4"))),
            (f"{ONE_NODE} --gpu 0", "spawn", Start(1, ("--processes", "4"))),
            (TWO_NODES, "spawn", Start(1, ("--processes", "4"))),
            ("DIR --world-size 2 --rank 0 --gpu 1 --dist-url tcp://h:1", "ddp", Start(None)),
            ("DIR --world-size 2 --rank 0 --dist-url tcp://h:1", "ddp", Start(None)),
        ],
    )
    def test_who_starts_what(self, words: str, strategy: str, start: Start) -> None:
        options = parse(*words.split())
        assert choose_strategy(options) == strategy
        assert imagenet.start(options, "4") == start

    def test_slurm_is_for_tasks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InputError, match="srun --ntasks-per-node=4 lockstep train imagenet --strategy slurm"):
            imagenet.start(parse("DIR", "--strategy", "slurm"), "auto")
        for variable, value in (
            (env.SLURM_JOB_ID, 7), (env.SLURM_STEP_ID, 0), (env.SLURM_PROCID, 0), (env.SLURM_NTASKS, 1),
            (env.SLURM_LOCALID, 0), (env.SLURM_NODEID, 0), (env.SLURM_NNODES, 1), (env.SLURM_STEP_NUM_TASKS, 1),
            (env.SLURM_STEP_TASKS_PER_NODE, "1"), (env.SLURM_STEP_NODELIST, "n1"),
        ):  # fmt: skip
            monkeypatch.setenv(variable.name, str(value))
        assert imagenet.start(parse("DIR", "--strategy", "slurm"), "auto") == Start(None)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("DIR --multiprocessing-distributed --strategy apex", "leave it out for apex"),
            ("DIR --strategy dp --gpu 1", "--gpu 1 means one process on that GPU"),
            ("--strategy ddp", "missing: the folder of the images"),
        ],
    )
    def test_contradictions_are_said_before_anything_is_started(
        self, words: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(train_command, "launch_job", lambda config: pytest.fail("started"))
        with pytest.raises(LaunchError, match=said):
            train_command.main(["imagenet", *words.split()])

    def test_the_command_hands_on_how_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[LaunchConfig] = []
        monkeypatch.setattr(train_command, "launch_job", lambda config: started.append(config) or 0)
        assert train_command.main(["imagenet", "--nproc", "3", *ONE_NODE.split()]) == 0
        (config,) = started
        assert (config.nproc, config.target) == (1, "lockstep.recipes.imagenet")
        assert config.args == ("--processes", "3", *ONE_NODE.split())

    def test_where_to_meet(self) -> None:
        host, _, port = meeting_url(parse(*ONE_NODE.split()), 1).removeprefix("tcp://").partition(":")
        assert host == "127.0.0.1"
        assert 1024 < int(port) < 65536
        with pytest.raises(InputError, match=r"--dist-url is tcp://IP_OF_NODE0:FREEPORT, but 2 hosts need one"):
            meeting_url(parse(*TWO_NODES.split()), 2)
        with pytest.raises(InputError, match=r"--dist-url is not given, but 2 hosts need one"):
            meeting_url(parse("DIR"), 2)
        for url in ("tcp://10.0.0.1:2345", "file:///shared/meeting", "env://"):
            assert meeting_url(parse("DIR", "--dist-url", url), 2) == url
        for url, said in (
            ("tcp://10.0.0.1", "without a port"),
            ("tcp://h:port", "without a port"),
            ("h:1", "expected tcp"),
        ):
            with pytest.raises(InputError, match=said):
                meeting_url(parse("DIR", "--dist-url", url), 2)


class TestSchedule:
    def test_a_rate_is_scaled_to_the_images_of_a_step(self) -> None:
        assert full_rate(ImagenetConfig()) == 0.1
        assert full_rate(ImagenetConfig(batch_size=128, accumulate=4)) == pytest.approx(0.2)
        assert full_rate(ImagenetConfig(batch_size=128, accumulate=4, scale_lr=False)) == 0.1

    def test_cosine_ends_at_nothing(self) -> None:
        config = ImagenetConfig(epochs=4, schedule="cosine", warmup=1)
        rates = [rate_of_step(config, step, 5) for step in range(20)]
        assert rates[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
        assert rates[5] == pytest.approx(0.1)
        assert all(later < earlier for earlier, later in itertools.pairwise(rates[5:]))
        assert rates[5 + 15 // 2] == pytest.approx(0.1 * 0.5, rel=0.15)
        assert rate_of_step(config, 20, 5) == pytest.approx(0, abs=1e-9)
        assert rate_of_step(ImagenetConfig(schedule="constant"), 10**6, 5) == 0.1

    def test_it_goes_on_by_the_step_alone(self) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=9)
        config = ImagenetConfig(epochs=3, step_epochs=1)
        schedule = RateSchedule(optimizer, config, 2)
        rates = []
        for _ in range(6):
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()
        assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
        other = RateSchedule(optimizer, config, 2)
        other.load_state_dict({"step": 3})
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        assert other.state_dict() == {"step": 3}

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            (ImagenetConfig(), "learning rate 0.1 for 256 images per step; x 0.1 every 30 epochs"),
            (
                ImagenetConfig(batch_size=512, warmup=5, schedule="cosine"),
                "learning rate 0.2 = 0.1 x 512 images per step / 256, after a warm-up of 5 epochs; cosine to 0 at "
                "epoch 90",
            ),
            (
                ImagenetConfig(batch_size=512, scale_lr=False, schedule="constant"),
                "learning rate 0.1 for 512 images per step, not scaled",
            ),
        ],
    )
    def test_what_is_said_of_it(self, config: ImagenetConfig, said: str) -> None:
        assert describe_rate(config) == said


# Of torchvision 0.28.0's networks with 1000 classes: parameters, and the names in their state_dict.
TORCHVISION = {
    "resnet18": (11_689_512, "779447cf0a59dec8"),
    "resnet34": (21_797_672, "5aa6d4978ba3a10a"),
    "resnet50": (25_557_032, "8f960d1d00758a98"),
    "resnet101": (44_549_160, "06870983fe3d8f04"),
    "resnet152": (60_192_808, "3e8a404c8d0a27d7"),
}
# After torch.manual_seed(0), with 7 classes: the sum of all that is positive and all that is negative, without signs.
WEIGHTS_OF_RESNET18 = 229438.66334956535


class TestModels:
    @pytest.mark.parametrize("name", TORCHVISION)
    def test_resnets_are_those_of_torchvision(self, name: str) -> None:
        with torch.device("meta"):
            model = create_model(name, 1000)
        count, names = TORCHVISION[name]
        assert sum(parameter.numel() for parameter in model.parameters()) == count
        assert hashlib.sha256("\n".join(model.state_dict()).encode()).hexdigest()[:16] == names

    def test_initial_weights_are_those_of_torchvision(self) -> None:
        torch.manual_seed(0)
        state = create_model("resnet18", 7).state_dict()
        total = sum(value.double().abs().sum().item() for value in state.values() if value.is_floating_point())
        assert total == pytest.approx(WEIGHTS_OF_RESNET18, rel=1e-9)

    @pytest.mark.parametrize("size", [8, 33, 64])
    def test_the_small_one_sees_one_image_at_a_time(self, size: int) -> None:
        torch.manual_seed(0)
        model = create_model("tiny", 10).double()
        images = torch.rand(5, 3, size, size, dtype=torch.float64)
        together, alone = model(images), torch.cat([model(image[None]) for image in images])
        assert together.shape == (5, 10)
        assert torch.allclose(together, alone, rtol=0, atol=1e-12)

    def test_others_need_torchvision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(models, "find_spec", lambda name: None)
        with pytest.raises(SetupError, match=r"--arch vgg11 needs torchvision.*pip install torchvision"):
            create_model("vgg11", 10)
        with pytest.raises(SetupError, match=r"; did you mean tiny or tiny-bn\?"):
            create_model("tinyy", 10)
        with pytest.raises(SetupError, match=r"--pretrained needs torchvision, which is not installed: pip"):
            create_model("resnet18", 10, pretrained=True)
        with pytest.raises(InputError, match="there are no trained weights for tiny"):
            create_model("tiny", 10, pretrained=True)


class FakeWeights:
    """Trained weights of a network, which is not downloaded."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.DEFAULT = self
        self.state = state

    def get_state_dict(self, **_: Any) -> dict[str, torch.Tensor]:
        return self.state


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What the program uses of torchvision: names, makers and weights of networks."""
    module = types.ModuleType("torchvision.models")

    def get_model(name: str, num_classes: int, **options: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(3, num_classes), *[nn.Identity() for _ in options])

    trained = {key: torch.full_like(value, 2) for key, value in create_model("resnet18", 1000).state_dict().items()}
    module.list_models = lambda module: ["vgg11", "inception_v3", "resnet18"]  # type: ignore[attr-defined]
    module.get_model = get_model  # type: ignore[attr-defined]
    module.get_model_weights = lambda name: FakeWeights(trained)  # type: ignore[attr-defined]
    parent = types.ModuleType("torchvision")
    parent.__spec__ = importlib.machinery.ModuleSpec("torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision", parent)
    monkeypatch.setitem(sys.modules, "torchvision.models", module)
    return module


class TestOthersModels:
    def test_names_of_torchvision(self, torchvision: types.ModuleType) -> None:
        model = create_model("vgg11", 7)
        assert model(torch.ones(1, 3)).shape == (1, 7)
        assert len(create_model("inception_v3", 7)) == 3, "without its second output"  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"--arch is 'vgg12'.*timm is not installed\); did you mean vgg11\?"):
            create_model("vgg12", 7)

    def test_sizes_of_images(self, torchvision: types.ModuleType) -> None:
        """Vision transformers are made for a size; what does not fit is said before the training begins."""
        made: list[dict[str, Any]] = []
        torchvision.list_models = lambda module: ["vit_b_16"]  # type: ignore[attr-defined]
        torchvision.get_model = lambda name, **options: made.append(options) or nn.Flatten()  # type: ignore[attr-defined]
        model = create_model("vit_b_16", 7, size=32)
        assert made == [{"num_classes": 7, "image_size": 32}]
        check_size(model, "vit_b_16", 32)
        assert model.training
        with pytest.raises(InputError, match="--arch vgg11 does not accept images of --size 32: mat1 and mat2 shapes"):
            check_size(nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), "vgg11", 32)

    def test_trained_weights_of_the_same_classes_and_of_others(self, torchvision: types.ModuleType) -> None:
        whole = create_model("resnet18", 1000, pretrained=True).state_dict()
        assert all(bool((value == 2).all()) for value in whole.values())
        state = create_model("resnet18", 7, pretrained=True).state_dict()
        assert [key for key, value in state.items() if not bool((value == 2).all())] == ["fc.weight", "fc.bias"]
        assert state["fc.weight"].shape == (7, 512)

    def test_weights_that_cannot_be_had(self, torchvision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(**_: Any) -> None:
            raise OSError("no route to host")

        monkeypatch.setattr(FakeWeights, "get_state_dict", staticmethod(fail))
        with pytest.raises(SetupError, match="weights of resnet18 cannot be downloaded: no route to host"):
            create_model("resnet18", 7, pretrained=True)

    def test_names_of_timm(self, torchvision: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        timm = types.ModuleType("timm")
        timm.__spec__ = importlib.machinery.ModuleSpec("timm", None)
        timm.is_model = lambda name: name == "convnext_atto"  # type: ignore[attr-defined]
        timm.create_model = lambda name, pretrained, num_classes: nn.Linear(3, num_classes)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "timm", timm)
        assert create_model("convnext_atto", 7)(torch.ones(1, 3)).shape == (1, 7)
        with pytest.raises(InputError, match="which neither torchvision nor timm has"):
            create_model("nothing_like_it", 7)


class Named:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"image {index}"


class Collected:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_broken_images_are_said_once(tmp_path: Path) -> None:
    with lockstep.init(device="cpu"):
        broken, view = BrokenImages({"train": Named(5), "val": Named(3)}, torch.device("cpu"), True), Collected()
        broken.report_to(tmp_path, [view])
        broken.note("train", torch.tensor([4, 1, 0]), torch.tensor([0, -1, 2]))
        assert broken.collect() == {"broken": 1}
        assert broken.collect() == {"broken": 1}
        assert view.lines == [f"1 image could not be read: listed in {tmp_path / 'broken.txt'}"]
        broken.note("val", torch.tensor([2]), torch.tensor([-1]))
        assert broken.collect() == {"broken": 2}
        assert (tmp_path / "broken.txt").read_text() == "image 1\nimage 2\n"
        assert len(view.lines) == 2
        assert BrokenImages({"train": Named(5)}, torch.device("cpu"), False).collect() == {}
