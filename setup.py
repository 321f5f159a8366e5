"""Metadata and extras of specjax."""

import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).parent
_VERSION = re.search(r'__version__ = "([^"]+)"',
                     (_ROOT / "specjax/version.py").read_text()).group(1)

_EXPERIMENTS = ["matplotlib", "tensorboardX"]
_PUBLISHED = ["gguf", "huggingface_hub", "jinja2>=3.1.6", "transformers>=5.24"]

setuptools.setup(
    name="specjax",
    version=_VERSION,
    description="Speculative decoding in JAX and Flax, proved by enumeration",
    long_description=(_ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    author="The specjax authors",
    keywords=["speculative decoding", "block verification", "JAX", "Flax"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # A path file of an editable installation names this directory, so that
    # Python finds the package from everywhere, also from the parent directory.
    package_dir={"": "."},
    packages=setuptools.find_packages(include=["specjax", "specjax.*"]),
    package_data={"specjax": ["py.typed", "data/*.json", "models/zoo/**/*"]},
    install_requires=[
        "absl-py",
        "chex",
        "filelock",
        "flax>=0.10",
        "jax>=0.8",
        "numpy",
        "optax>=0.2.5",
        "orbax-checkpoint",
        "safetensors>=0.8",
        "scipy",
        "tokenizers",
        "tqdm",
    ],
    extras_require={
        "experiments": _EXPERIMENTS,
        "datasets": ["datasets"],
        "docs": [*_EXPERIMENTS, "furo", "myst-nb", "sphinx>=8"],
        "gpu-aot": ["jax[cuda13]>=0.8"],
        "published": _PUBLISHED,
        "test": [*_EXPERIMENTS, *_PUBLISHED, "ipykernel", "jsonschema",
                 "nbclient", "nbformat", "pytest", "pytest-timeout",
                 "pytest-xdist>=3.7", "rfc3339-validator", "rfc3986-validator",
                 "ruff"],
        "tpu-aot": ["jax[tpu]>=0.8"],
        "wandb": ["wandb"],
        "transformers": [*_PUBLISHED, "accelerate", "torch"],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
