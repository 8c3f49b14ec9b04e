"""Packaging of hmt_deepspeed. The version is read from `hmt_deepspeed/version.py`."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = runpy.run_path(str(ROOT / "hmt_deepspeed" / "version.py"))["__version__"]

setup(
    name="hmt_deepspeed",
    version=VERSION,
    description="Low-rank full-parameter training for DeepSpeed on too little GPU memory",
    license="Apache-2.0",
    packages=find_packages(include=["hmt_deepspeed*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.8,<=2.13.0",  # 2.8: the activation backend listens to the checkpoint's hooks
        "deepspeed>=0.19.8,<0.20",
        "transformers>=5.4,<6",  # 5.4: mask functions are told q_length, which FPDT's asks for
        # 3.4 is what torch 2.8 pins; a CUDA torch picks its own version inside this range.
        'triton>=3.4,<4; platform_system=="Linux"',
        "accelerate>=1.1",
        "pydantic>=2.7,<3",
        "greenlet>=3.1",  # coroutines of micro-batches, layer by layer
        "tokenizers>=0.22",
        "safetensors>=0.4.3",
        "tqdm>=4.60",
        "psutil>=5.9",
        "numpy>=1.26",
        "scipy>=1.11",  # HiGHS: milp, and linprog's marginals
    ],
    entry_points={
        "console_scripts": [
            "hmt-plan = hmt_deepspeed.planner.command:main",
            "hmt-doctor = hmt_deepspeed.doctor:main",
            "hmt-report = hmt_deepspeed.report.command:main",
        ]
    },
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<3",
            "galore-torch==1.0",
            "ninja>=1.11",
            "apollo-torch==1.0.3",
            "pytorch-optimizer>=4.1,<5",
            "matplotlib>=3.8",
            "peft>=0.17",
            "trl>=1.16,<2",
            "datasets>=2.15",
        ],
        # What launch/compare.py compares with, and draws with.
        "compare": [
            "galore-torch==1.0",
            "apollo-torch==1.0.3",
            "pytorch-optimizer>=4.1,<5",  # SOAP and Lion
            "matplotlib>=3.8",
            "peft>=0.17",
        ],
        "report": ["matplotlib>=3.8"],  # what hmt-report draws with
        "hub": ["datasets>=2.15"],
    },
)
