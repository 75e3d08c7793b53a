"""Checkpoint manifests: what they notice, and what is refused. Damage is tested in test_inventory.py."""

import os

import pytest
from etils import epath

from headrace.checkpoint import manifest


def write_step(directory: epath.Path) -> manifest.Manifest:
    (directory / "params").mkdir(parents=True)
    (directory / "params/weights").write_bytes(b"weights")
    return manifest.seal(directory, step=2, tier="temporary")


def test_a_sealed_step_is_read_back_and_verified(tmp_path):
    directory = epath.Path(tmp_path / "2")
    sealed = write_step(directory)
    assert manifest.read(directory) == manifest.verify(directory) == sealed
    assert sealed.step == 2 and sealed.tier == "temporary" and sealed.size == len(b"weights")


def test_a_folder_that_cannot_be_listed_is_not_sealed(tmp_path, monkeypatch):
    directory = epath.Path(tmp_path / "2")
    write_step(directory)
    (directory / manifest.NAME).unlink()
    scandir = os.scandir

    def fail_for_params(path="."):
        if str(path).endswith("2/params"):
            raise OSError(5, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail_for_params)
    with pytest.raises(OSError, match="Input/output"):
        manifest.seal(directory, step=2, tier="temporary")
    assert manifest.read(directory) is None


def test_a_manifest_that_lists_files_outside_its_folder_is_refused(tmp_path):
    directory = epath.Path(tmp_path / "1")
    directory.mkdir()
    forged = manifest.Manifest(1, "temporary", {"../../secret": manifest.FileChecksum(0, 0)})
    (directory / manifest.NAME).write_bytes(manifest.to_bytes(forged))
    with pytest.raises(manifest.Damaged, match="outside of the folder"):
        manifest.verify(directory)
