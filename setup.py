"""What pyproject.toml cannot say: recipes and sample data travel with the package, in the checkout's own layout."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["fsd_core*", "fsd_infer*", "fsd_bench*", "fsd_train*"]),
        "fsd_train.shipped.recipes",
        "fsd_train.shipped.data",
    ],
    package_dir={"fsd_train.shipped.recipes": "recipes", "fsd_train.shipped.data": "data"},
    package_data={
        "fsd_infer": [
            "cpu/kernels.cpp",
            "cpu/native/*.h",
            "serving/page.html",
            "shipped/**/*",
            "py.typed",
        ],
        "fsd_core": ["py.typed"],
        "fsd_bench": ["board.html", "evidence/page.html", "lm_eval/tasks/*", "py.typed"],
        "fsd_train": ["commands/*.in", "commands/quickstart.yaml", "py.typed"],
        "fsd_train.shipped.recipes": ["*.yaml"],
        "fsd_train.shipped.data": ["quickstart_prompts.jsonl", "smollm2-135m-answers.jsonl.gz"],
    },
    include_package_data=False,
)
