"""A hook of mkdocs: the site's first page is the README, and links that leave docs/ lead to the repository."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(\]\(|src(?:set)?=\")(?!\w+:|#)([^)#\s\"]*)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    docs = Path(config["docs_dir"])
    source = docs / page.file.src_uri
    if page.file.src_uri == "index.md":
        source = docs.parent / "README.md"
        markdown = source.read_text()

    def of(link: "re.Match[str]") -> str:
        if not link[2]:
            return link[0]
        target = (source.parent / link[2]).resolve()
        if target == docs.parent / "README.md":
            target = docs / "index.md"
        if target.is_relative_to(docs) and files.get_file_from_path(target.relative_to(docs).as_posix()):
            up = "../" * page.file.src_uri.count("/")
            return f"{link[1]}{up}{target.relative_to(docs)}"
        if not target.exists():
            return link[0]  # mkdocs names it, with the page
        return f"{link[1]}{config['repo_url']}/blob/main/{target.relative_to(docs.parent)}"

    return LINK.sub(of, markdown)
