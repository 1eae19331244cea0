"""Machine code that was changed since the export does not run."""

from __future__ import annotations

import pytest

from tests.support.tiny import TinyArtifact
from weightswap_exporter.engines.compiling import with_files
from weightswap_runtime import ArtifactError, load
from weightswap_runtime.engines.aoti_package import machine_targets, package_file
from weightswap_runtime.format.manifest import encode_manifest


@pytest.mark.skipif(not machine_targets(), reason="nothing is compiled for this machine")
def test_an_altered_package_is_refused(tiny: TinyArtifact) -> None:
    name = package_file(machine_targets()[0], "forward")
    (tiny.path / name).parent.mkdir(parents=True)
    (tiny.path / name).write_bytes(b"another")
    tiny.write_manifest(encode_manifest(with_files(tiny.manifest, {name: b"as compiled"})))
    with pytest.raises(ArtifactError, match="altered since the export"):
        load(tiny.path, engine="aoti")
