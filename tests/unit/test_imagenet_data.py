"""What the ImageNet program reads: drawn images, listings of folders, files of all kinds, crops."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.commands import data as data_command
from lockstep.errors import DataError, InputError, LaunchError, SetupError
from lockstep.recipes import options
from lockstep.recipes.imagenet import listing as listings
from lockstep.recipes.imagenet.images import (
    BROKEN,
    DummyImages,
    FolderImages,
    centre_box,
    normalize,
    random_box,
    read_image,
)
from lockstep.recipes.imagenet.listing import list_part, scan_folder
from lockstep.recipes.imagenet.shapes import MAX_CLASSES, ShapesFolder, class_names, write_shapes

RED, BLUE = (200, 30, 30), (30, 30, 200)


def digest(folder: Path) -> dict[str, str]:
    """Contents of all files below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


class TestShapes:
    def test_a_folder_that_everybody_draws_alike(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            assert write_shapes(ShapesFolder(tmp_path / name, classes=3, images=7, val_images=3, size=16)) == (7, 3)
        drawn = digest(tmp_path / "a")
        assert drawn == digest(tmp_path / "b")
        assert len(set(drawn.values())) == 10, "no two images are the same"
        per_class = [len(list((tmp_path / "a" / "train" / name).iterdir())) for name in class_names(3)]
        assert per_class == [3, 2, 2]
        with Image.open(tmp_path / "a" / "train" / "000-disk" / "0000.jpg") as image:
            assert (image.format, image.size, image.mode) == ("JPEG", (16, 16), "RGB")

    def test_more_leaves_what_was_there_as_it_was(self, tmp_path: Path) -> None:
        write_shapes(ShapesFolder(tmp_path / "few", classes=2, images=4, size=16))
        write_shapes(ShapesFolder(tmp_path / "many", classes=11, images=60, size=16))
        few, many = digest(tmp_path / "few"), digest(tmp_path / "many")
        assert few.items() <= many.items()
        write_shapes(ShapesFolder(tmp_path / "other", classes=2, images=4, size=16, seed=1))
        assert not digest(tmp_path / "other").items() & few.items()

    def test_classes_have_names_of_their_own(self) -> None:
        names = class_names(MAX_CLASSES)
        assert len(set(names)) == MAX_CLASSES == 1000
        assert names == sorted(names), "labels are places in the sorted names"

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"classes": 1}, "--classes is 1; expected 2 to 1000"),
            ({"images": 9}, "--images is 9; expected 10 or more: every class needs an image"),
            ({"size": 4}, "--size is 4; expected 8 to 4096"),
            ({"quality": 99}, "--quality is 99; expected 1 to 95"),
        ],
    )
    def test_what_cannot_be_drawn(self, tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
        with pytest.raises(InputError, match=said):
            write_shapes(ShapesFolder(tmp_path / "new", **wrong))
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_written_over(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for target in (tmp_path, tmp_path / "file"):
            with pytest.raises(InputError, match="exists and is not empty"):
                write_shapes(ShapesFolder(target))
        (tmp_path / "empty").mkdir()
        write_shapes(ShapesFolder(tmp_path / "empty", classes=2, images=2, size=8))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]

    def test_the_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ("make-imagenet", str(tmp_path / "new"), "--classes", "2", "--images", "4", "--size", "8")
        assert data_command.main(words) == 0
        assert capsys.readouterr().out.endswith("4 training and 2 validation images in 2 classes\n")
        with pytest.raises(LaunchError, match="exists and is not empty"):
            data_command.main(words)
        with pytest.raises(LaunchError, match="unknown data 'make-imagnet', did you mean 'make-imagenet'"):
            data_command.main(["make-imagnet"])
        assert data_command.main(["--help"]) == 0

    def test_without_pillow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(options, "find_spec", lambda name: None)
        with pytest.raises(SetupError, match=r"needs Pillow: pip install pillow"):
            data_command.main(["make-imagenet", "new"])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """train/ with two classes, a file that is no image, a hidden one, and an image in a folder of its own."""
    for name in ("train/cat/b.JPEG", "train/cat/a.png", "train/cat/notes.txt", "train/cat/.hidden.png",
                 "train/ant/more/deep.jpg", "train/.cache/x.png"):  # fmt: skip
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    age(tmp_path / "data")
    return tmp_path / "data"


def age(folder: Path) -> None:
    """Have folders that changed long ago."""
    for path in (folder, *(each for each in folder.rglob("*") if each.is_dir())):
        os.utime(path, (1_000_000_000, 1_000_000_000))


class TestListing:
    def test_what_is_listed(self, tree: Path) -> None:
        found, folders = scan_folder(tree / "train")
        assert found.classes == ("ant", "cat")
        assert [found.path(index).relative_to(tree).as_posix() for index in range(len(found))] == [
            "train/ant/more/deep.jpg", "train/cat/a.png", "train/cat/b.JPEG",
        ]  # fmt: skip
        assert found.labels.tolist() == [0, 1, 1]
        assert {Path(folder).name for folder, _ in folders} == {"train", "ant", "more", "cat"}

    def test_it_is_kept_until_a_folder_changes(
        self, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scans: list[Path] = []

        def counting(root: Path) -> Any:
            scans.append(root)
            return scan_folder(root)

        monkeypatch.setattr(listings, "scan_folder", counting)
        kept = tmp_path / "kept"
        first = list_part(tree, "train", kept)
        second = list_part(tree, "train", kept)
        assert len(scans) == 1
        assert [second.path(index) for index in range(3)] == [first.path(index) for index in range(3)]
        assert (second.classes, second.labels.tolist(), second.seconds) == (first.classes, [0, 1, 1], 0)

        (tree / "train" / "ant" / "more" / "new.jpg").touch()  # changes the time of the folder it is in
        assert len(list_part(tree, "train", kept)) == 4
        assert len(scans) == 2
        # That folder has changed just now, and might again within the tick of its clock.
        assert len(list_part(tree, "train", kept)) == 4
        assert len(scans) == 3
        age(tree)
        list_part(tree, "train", kept)
        list_part(tree, "train", kept)
        assert len(scans) == 4

    @pytest.mark.parametrize("spoil", ["cut", "empty", "other version", "nonsense"])
    def test_a_kept_listing_that_cannot_be_used_is_made_again(self, tree: Path, tmp_path: Path, spoil: str) -> None:
        kept = tmp_path / "kept"
        list_part(tree, "train", kept)
        (file,) = kept.iterdir()
        if spoil == "other version":
            arrays = dict(np.load(file))
            arrays["header"] = np.frombuffer(
                arrays["header"].tobytes().replace(b'"version": 1', b'"version": 9'), np.uint8
            )
            np.savez(file, **arrays)
        else:
            content = file.read_bytes()
            file.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "nonsense": b"no zip" * 99}[spoil])
        assert len(list_part(tree, "train", kept)) == 3
        assert list_part(tree, "train", kept).seconds == 0, "the new one is kept"

    def test_where_it_cannot_be_kept_it_is_listed_each_time(self, tree: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for _ in range(2):
            assert list_part(tree, "train", tmp_path / "file" / "kept").seconds > 0

    def test_folders_that_are_no_image_folder(self, tree: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"data/val is missing: .*data must have train/ and val/.*in it: train"):
            list_part(tree, "val", tmp_path / "kept")
        with pytest.raises(DataError, match=r"nowhere/train is missing.*there is no such folder"):
            list_part(tmp_path / "nowhere", "train", tmp_path / "kept")
        (tree / "val").mkdir()
        with pytest.raises(DataError, match="data/val has no class folders"):
            list_part(tree, "val", tmp_path / "kept")
        (tree / "val" / "cat").mkdir()
        (tree / "val" / "cat" / "notes.txt").touch()
        with pytest.raises(DataError, match=r"data/val/cat has no images: expected files that end in .jpg, .jpeg"):
            list_part(tree, "val", tmp_path / "kept")

    def test_links(self, tree: Path, tmp_path: Path) -> None:
        (tree / "train" / "dog").symlink_to(tree / "train" / "cat")
        assert len(scan_folder(tree / "train")[0]) == 5
        (tree / "train" / "cat" / "up").symlink_to(tree / "train" / "cat")
        with pytest.raises(DataError, match="cat/up links to one of its parent folders"):
            scan_folder(tree / "train")

    def test_names_that_are_no_text(self, tree: Path, tmp_path: Path) -> None:
        name = os.fsdecode(b"caf\xe9.jpg")
        (tree / "train" / "cat" / name).touch()
        age(tree)
        for _ in range(2):  # listed, and read back
            found = list_part(tree, "train", tmp_path / "kept")
            assert found.path(len(found) - 1).exists()

    def test_other_labels(self, tree: Path) -> None:
        found, _ = scan_folder(tree / "train")
        assert found.relabelled([7, 2], ("a",) * 8).labels.tolist() == [7, 2, 2]


def halves(size: tuple[int, int] = (40, 20)) -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


def near(pixel: Any, colour: tuple[int, int, int]) -> bool:
    return all(abs(value - wanted) < 12 for value, wanted in zip(pixel, colour, strict=True))


class TestFiles:
    def test_a_photo_on_its_side_is_set_up(self, tmp_path: Path) -> None:
        """What is stored for each orientation is what `halves` becomes when a camera is held that way."""
        stored = {
            1: None,
            2: Image.Transpose.FLIP_LEFT_RIGHT,
            3: Image.Transpose.ROTATE_180,
            4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE,
            6: Image.Transpose.ROTATE_90,
            7: Image.Transpose.TRANSVERSE,
            8: Image.Transpose.ROTATE_270,
        }
        for orientation, turn in stored.items():
            upright = halves()
            upright.paste((0, 0, 0), (0, 0, 10, 10))  # so that no two turns look the same
            exif = Image.Exif()
            exif[0x0112] = orientation
            path = tmp_path / f"{orientation}.jpg"
            (upright if turn is None else upright.transpose(turn)).save(path, exif=exif, quality=95)
            image = read_image(path)
            assert image.size == (40, 20)
            assert near(image.getpixel((4, 4)), (0, 0, 0))
            assert near(image.getpixel((4, 16)), RED)
            assert near(image.getpixel((36, 16)), BLUE)

    def test_kinds_of_pictures(self, tmp_path: Path) -> None:
        """All become RGB with 8 bits a channel, by what they hold and not by their names."""
        picture = halves()
        grey = picture.convert("L")
        with_alpha = picture.copy()
        with_alpha.putalpha(128)
        wide = Image.fromarray(np.asarray(grey, dtype=np.uint16) * 257)
        for name, image, form in (
            ("png.JPEG", picture, "PNG"),
            ("cmyk.jpg", picture.convert("CMYK"), "JPEG"),
            ("palette.png", picture.quantize(8), "PNG"),
            ("alpha.png", with_alpha, "PNG"),
            ("bmp.jpg", picture, "BMP"),
        ):
            image.save(tmp_path / name, form)
            found = read_image(tmp_path / name)
            assert (found.mode, found.size) == ("RGB", (40, 20))
            assert near(found.getpixel((4, 10)), RED), name
            assert near(found.getpixel((36, 10)), BLUE), name
        for name, image in (("grey.jpg", grey), ("wide.png", wide), ("bit.png", grey.point(lambda v: v > 50, "1"))):
            image.save(tmp_path / name)
            found = read_image(tmp_path / name)
            value = 255 if name == "bit.png" and grey.getpixel((4, 10)) > 50 else grey.getpixel((4, 10))
            assert found.mode == "RGB"
            assert near(found.getpixel((4, 10)), (value, value, value)), name

    def test_odd_metadata_does_not_spoil_a_picture(self, tmp_path: Path) -> None:
        halves().save(tmp_path / "a.jpg", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09garbage")
        assert near(read_image(tmp_path / "a.jpg").getpixel((4, 10)), RED)

    @pytest.mark.parametrize("kind", ["cut", "empty", "text", "header"])
    def test_what_is_no_picture_is_named(self, tmp_path: Path, kind: str) -> None:
        buffer = io.BytesIO()
        halves((200, 200)).save(buffer, "JPEG")
        content = buffer.getvalue()
        spoiled = {"cut": content[: len(content) // 2], "empty": b"", "text": b"not a picture", "header": content[:20]}
        path = tmp_path / "broken.jpg"
        path.write_bytes(spoiled[kind])
        with pytest.raises(DataError, match=rf"{path} cannot be read as an image .*--skip-broken"):
            read_image(path)

    def test_what_is_not_there_is_not_skipped(self, tmp_path: Path) -> None:
        """A folder that is gone half way is no set of broken images."""
        (tmp_path / "train" / "cat").mkdir(parents=True)
        path = tmp_path / "train" / "cat" / "a.png"
        halves().save(path)
        found, _ = scan_folder(tmp_path / "train")
        images = FolderImages(found, 8, augment=False, skip_broken=True)
        path.write_bytes(b"")
        image, label, index = images.__getitem__(0, generator=torch.Generator())
        assert (image.shape, int(image.sum()), label, index) == ((8, 8, 3), 0, BROKEN, 0)
        path.unlink()
        with pytest.raises(DataError, match=rf"{path} cannot be opened: No such file"):
            images.__getitem__(0, generator=torch.Generator())


class TestCrops:
    @pytest.mark.parametrize("size", [(500, 375), (20, 20), (1, 1), (3, 1000), (1000, 3)])
    def test_random_parts_lie_inside_and_differ(self, size: tuple[int, int]) -> None:
        width, height = size
        boxes = [random_box(width, height, torch.Generator().manual_seed(seed)) for seed in range(200)]
        for left, top, right, bottom in boxes:
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
        if min(size) > 100:
            areas = [(right - left) * (bottom - top) / (width * height) for left, top, right, bottom in boxes]
            ratios = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
            assert len(set(boxes)) == 200
            assert 0.075 < min(areas) < 0.15
            assert 0.85 < max(areas) <= 1
            assert 0.74 < min(ratios) < 0.8
            assert 1.25 < max(ratios) < 1.35

    def test_one_seed_draws_one_part(self) -> None:
        draws = [random_box(500, 375, torch.Generator().manual_seed(3)) for _ in range(2)]
        assert draws[0] == draws[1]

    def test_the_middle(self) -> None:
        assert centre_box(512, 256) == (144, 16, 368, 240)

    def test_flips_come_in_every_second_case_and_turn_the_picture(self, tmp_path: Path) -> None:
        (tmp_path / "cat").mkdir()
        halves((40, 40)).save(tmp_path / "cat" / "a.png")
        found, _ = scan_folder(tmp_path)
        images = FolderImages(found, 8, augment=True)
        first_is_red = []
        for seed in range(300):
            image, _, _ = images.__getitem__(0, generator=torch.Generator().manual_seed(seed))
            left, right = (image[:, column].float().mean(0).tolist() for column in (0, 7))
            if near(left, RED) != near(right, RED):  # a part with both halves
                first_is_red.append(near(left, RED))
        assert 0.4 < sum(first_is_red) / len(first_is_red) < 0.6

    @pytest.mark.parametrize("channels_last", [False, True])
    def test_normalization(self, channels_last: bool) -> None:
        images = torch.randint(0, 256, (2, 5, 4, 3), dtype=torch.uint8)
        result = normalize(images, torch.float64, channels_last=channels_last)
        assert result.shape == (2, 3, 5, 4)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert result.is_contiguous(memory_format=layout)
        expected = (images[1, 2, 3, 2].item() / 255 - 0.406) / 0.225
        assert result[1, 2, 2, 3].item() == pytest.approx(expected, abs=1e-14)

    def test_noise_has_the_dimensions_of_imagenet(self) -> None:
        assert [len(DummyImages(part, 8)) for part in ("train", "val")] == [1_281_167, 50_000]
        images = DummyImages("val", 8)
        first, again = (images.__getitem__(1005, generator=torch.Generator().manual_seed(1)) for _ in range(2))
        assert torch.equal(first[0], again[0])
        assert (first[0].shape, first[0].dtype, first[1:]) == ((8, 8, 3), torch.uint8, (5, 1005))
