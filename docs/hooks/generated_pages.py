"""Pages of the site that are made from files elsewhere in the repository,
so that no text stands twice.

The studies are `recipes/` as committed, the command line is what `--help` says, the notebook is its
own outputs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"
WHOLE = {
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
}


def on_files(files: Files, config: Any) -> Files:
    """mkdocs's event: add the generated pages to those of `docs/`."""
    for name, page in WHOLE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "cli.md", content=command_line()))
    for path in (ROOT / "model_cards").glob("*.md"):
        if not path.name.endswith(".template.md"):
            files.append(
                File.generated(config, f"model_cards/{path.name}", content=path.read_text())
            )
    for path in sorted((ROOT / "recipes").rglob("*")):
        page = f"studies/{path.relative_to(ROOT / 'recipes').as_posix()}"
        if path.suffix == ".md":
            files.append(File.generated(config, page, content=study(path)))
        elif path.suffix == ".png":
            files.append(File.generated(config, page, abs_src_path=str(path)))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, images = notebook(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, image in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=image))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """mkdocs's event: in pages of `docs/`, links to other files of the repository become
    links to their pages."""
    if page.file.generated_by:
        return markdown
    for name, generated in {
        "recipes/": "studies/",
        "model_cards/": "model_cards/",
        **WHOLE,
    }.items():
        markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./{name}", rf"](\1{generated}", markdown)
    return markdown.replace("](notebooks/quickstart.ipynb)", "](notebooks/quickstart.md)")


def study(path: Path) -> str:
    """A study's page. The list of studies also gets links to them."""
    text = path.read_text()
    if path.parent != ROOT / "recipes":
        return text
    folders = {folder.name for folder in path.parent.iterdir() if (folder / "README.md").is_file()}
    text = text.replace("# Recipes", "# Studies", 1)
    table = re.sub(r"^\| `(\w+)`", lambda row: linked(row, folders), text, flags=re.MULTILINE)
    return table.replace("](../docs/", "](../")


def linked(row: re.Match[str], folders: set[str]) -> str:
    name = row[1]
    return f"| [`{name}`]({name}/README.md)" if name in folders else row[0]


def command_line() -> str:
    """Every command's help, as Typer writes it."""
    command = [
        sys.executable,
        "-m",
        "typer",
        "hf_depthroute.cli",
        "utils",
        "docs",
        "--name",
        "hf-depthroute",
    ]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    text = text.replace("\b", "").replace("# `hf-depthroute`", "# Command line", 1)
    text = re.sub(
        r"<(str|int|float|path|int range|float range)>", lambda kind: kind[1].upper(), text
    )
    # Click's "\b" keeps the lines of an example; Markdown wants a block.
    return re.sub(r"^Example:\n((?:  .*\n)+)", r"```console\n\1```\n", text, flags=re.MULTILINE)


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """An executed notebook as Markdown, and its images by name."""
    from nbconvert import MarkdownExporter

    exporter = MarkdownExporter()
    name = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    text, resources = exporter.from_filename(str(path), resources=name)
    note = (
        f"*This page is [{path.name}]({path.name}) with the outputs that are committed in it.*\n\n"
    )
    heading, rest = text.lstrip().split("\n", 1)
    return f"{heading}\n\n{note}{rest}", resources["outputs"]
