"""What pyproject.toml cannot say: recipes and sample data travel with the package, in the checkout's own layout.

FSD_REPOSITORY is the repository's address, https://HOST/OWNER/NAME, for the package's page on an index: its links and
those of README. Without it, README's links to files become plain text, since an index would look for them on its host.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

ADDRESS = os.environ.get("FSD_REPOSITORY", "").rstrip("/")
URLS = {
    "Source": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


def readme(text: str, address: str) -> str:
    """Return README for a page elsewhere: its links to files lead to the repository, or become their text."""

    def link(found: re.Match[str]) -> str:
        name, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        kind = "blob" if Path(target.partition("#")[0]).suffix else "tree"
        return f"[{name}]({address}/{kind}/main/{target})" if address else name

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)  # no links in code
    return "".join(part if part.startswith("```") else re.sub(r"\[([^]]*)]\(([^)]+)\)", link, part) for part in parts)


if __name__ == "__main__":
    setup(
        long_description=readme(Path("README.md").read_text(encoding="utf-8"), ADDRESS),
        long_description_content_type="text/markdown",
        project_urls={name: ADDRESS + path for name, path in URLS.items()} if ADDRESS else {},
        packages=[
            *find_packages(include=["fsd_core*", "fsd_infer*", "fsd_bench*", "fsd_train*"]),
            "fsd_train.shipped.recipes",
            "fsd_train.shipped.data",
        ],
        package_dir={"fsd_train.shipped.recipes": "recipes", "fsd_train.shipped.data": "data"},
        package_data={
            "fsd_infer": [
                "backends/cpu/kernels.cpp",
                "backends/cpu/native/*.h",
                "serving/page.html",
                "shipped/smollm2-135m/*",  # the maths adapter is in the repository alone
                "py.typed",
            ],
            "fsd_core": ["py.typed"],
            "fsd_bench": ["board.html", "evidence/page.html", "lm_eval/tasks/*", "py.typed"],
            "fsd_train": ["commands/*.in", "commands/quickstart.yaml", "py.typed"],
            "fsd_train.shipped.recipes": ["*.yaml"],
            "fsd_train.shipped.data": ["quickstart_prompts.jsonl", "quickstart_answers.jsonl.gz"],
        },
        include_package_data=False,
    )
