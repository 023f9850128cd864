"""Private files: their owner's alone, whatever the umask; what is wider is told, and mended without following links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from permissions import NOBODY, mode, umask

from pagefold.errors import ConfigError
from pagefold.files.private import check_private, create_private, make_private_folder, open_private
from pagefold.files.whole import write_whole

IS_ROOT = os.geteuid() == 0


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o277, 0o777])
def test_files_and_folders_are_their_owners_alone_whatever_the_umask(tmp_path, mask):
    with umask(mask):
        fd = open_private(tmp_path / "opened", os.O_RDWR | os.O_CREAT)
        assert mode(tmp_path / "opened") == 0o600, "before a byte is in it"
        os.close(fd)
        with create_private(tmp_path / "created") as out:
            assert mode(tmp_path / "created") == 0o600
            out.write(b"x")
        make_private_folder(tmp_path / "a" / "b" / "c")
        make_private_folder(tmp_path / "a" / "b" / "c")
        write_whole(tmp_path / "whole", "x", is_private=True)
    assert mode(tmp_path / "whole") == 0o600
    for folder in ("a", "a/b", "a/b/c"):
        assert mode(tmp_path / folder) == 0o700


def test_what_is_there_keeps_its_permissions_unless_it_is_replaced(tmp_path):
    file = tmp_path / "file"
    file.write_text("there")
    file.chmod(0o644)
    os.close(open_private(file, os.O_RDWR | os.O_CREAT))
    assert (mode(file), file.read_text()) == (0o644, "there")
    tmp_path.chmod(0o755)
    make_private_folder(tmp_path)
    assert mode(tmp_path) == 0o755
    write_whole(file, "new", is_private=True)
    assert (mode(file), file.read_text()) == (0o600, "new")


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        make_private_folder(tmp_path / "file" / "below")


def test_a_new_file_takes_the_place_of_a_link_and_not_of_what_is_behind_it(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("mine")
    link.symlink_to(victim)
    with create_private(link) as out:
        out.write(b"new")
    assert victim.read_text() == "mine"
    assert not link.is_symlink()


def test_wide_permissions_are_told_with_path_mode_and_remedy(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    file = folder / "file"
    file.touch(0o600)
    assert check_private("it", folder, [file]) == []
    file.chmod(0o640)
    (line,) = check_private("the file", file)
    assert all(part in line for part in ("the file", f"{file} (mode 0640)", f"chmod 600 {file}", "--fix-permissions"))
    folder.chmod(0o755)
    (line,) = check_private("the folder", folder, [file, folder / "not there"])
    assert f"{folder} (mode 0755) and 1 more" in line
    assert f"chmod -R go= {folder}" in line
    assert (mode(folder), mode(file)) == (0o755, 0o640), "nothing is changed unasked"
    (line,) = check_private("the folder", folder, [file], fix=True)
    assert "2 files and folders" in line
    assert (mode(folder), mode(file)) == (0o700, 0o600)
    assert check_private("the folder", folder, [file], fix=True) == []


def test_no_link_is_followed_to_mend(tmp_path):
    victim, folder, link = tmp_path / "victim", tmp_path / "folder", tmp_path / "link"
    victim.touch()
    victim.chmod(0o644)
    folder.mkdir(0o700)
    (folder / "inner").symlink_to(victim)
    assert check_private("it", folder, [folder / "inner"], fix=True) == []
    folder.chmod(0o755)
    link.symlink_to(folder)
    (line,) = check_private("it", link, fix=True)
    assert "is reached by a link" in line
    assert f"chmod 700 {folder}" in line
    assert (mode(victim), mode(folder)) == (0o644, 0o755)
    (folder / "hard").hardlink_to(victim)
    (line,) = check_private("it", folder / "hard", fix=True)
    assert "a hard link" in line
    assert mode(victim) == 0o644


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_files_of_another_user_are_told_plainly(tmp_path):
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o644)
    os.seteuid(NOBODY)
    try:
        (line,) = check_private("the file", file, fix=True)
        assert "Operation not permitted; its owner is root" in line
        with pytest.raises(ConfigError, match="Permission denied"):
            write_whole(tmp_path / "whole", "x", is_private=True)
    finally:
        os.seteuid(0)
    assert mode(file) == 0o644
    os.chown(file, NOBODY, -1)
    file.chmod(0o600)
    (line,) = check_private("the file", file)
    assert "belongs to nobody" in line


def test_a_folder_that_cannot_be_made_is_an_error_and_no_loop():
    with pytest.raises(OSError, match="nowhere"):
        make_private_folder(Path("/proc/nowhere/below"))
