"""Everything of others that ships with us has a licence file, and every dependency states one."""

import importlib.util
import json
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "src/tandem/server/page/static/vendor"
_spec = importlib.util.spec_from_file_location("sbom", ROOT / "tools" / "sbom.py")
sbom = importlib.util.module_from_spec(_spec)
sys.modules["sbom"] = sbom
_spec.loader.exec_module(sbom)


def test_each_script_of_others_is_known_and_has_its_licence():
    assert {file.name for file in VENDOR.glob("*.mjs")} == set(sbom.VENDORED)
    for name in sbom.VENDORED:
        assert (VENDOR / f"{Path(name).stem}.LICENSE").stat().st_size > 500


def test_licences_are_in_the_wheel_and_those_of_compiled_code_are_current():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {file for glob in project["license-files"] for file in ROOT.glob(glob)}
    wanted = {ROOT / "LICENSE", *VENDOR.glob("*.LICENSE")}
    wanted |= {ROOT / f"native/licenses/{name}.LICENSE" for name in sbom.COMPILED}
    assert found == wanted
    (own,) = [f for f in metadata.files("nanobind") if f.parts[-2:] == ("licenses", "LICENSE")]
    assert (ROOT / "native/licenses/nanobind.LICENSE").read_text() == own.read_text()


def test_the_bill_has_what_the_wheel_has_and_what_is_installed(tmp_path):
    wheel = tmp_path / "tandem_llm-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in VENDOR.glob("*.mjs"):
            archive.write(file, sbom.VENDOR + file.name)
    bom = json.loads(json.dumps(sbom.make_bom(wheel, {"serve"})))
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    components = {each["bom-ref"]: each for each in bom["components"]}
    assert {"torch", "msgspec", "compiled/nanobind", sbom.VENDOR + "uplot.mjs"} <= set(components)
    assert [name for name, each in components.items() if "unknown" in str(each["licenses"])] == []
    edges = {edge["ref"]: set(edge["dependsOn"]) for edge in bom["dependencies"]}
    assert set().union(*edges.values()) <= set(components)
    assert set(components) - {"tandem-llm"} <= set().union(*edges.values())
    page = (ROOT / "docs/licences.md").read_text()
    direct = [components[name]["name"] for name in edges["tandem-llm"]]
    assert [name for name in direct if f"| {name} |" not in page] == []
