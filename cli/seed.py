"""`headworks seed`: pull a model and make it answerable on a control plane that runs elsewhere.

`headworks up` does this by itself; this is for containers and for machines of your own.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import httpx

from artifacts.errors import ArtifactError
from cli.models import pull_with_progress
from cli.output import Output
from cli.place import complain
from local.seed import REGION, Admin, SeedError, seed


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Where, with which token, and what."""
    parser = commands.add_parser("seed", help="pull, register and route a model elsewhere")
    parser.add_argument("--control-plane", required=True, metavar="URL")
    parser.add_argument("--admin-token-file", type=Path, metavar="FILE")
    parser.add_argument("--models", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--demo-key", type=Path, required=True, metavar="FILE", help="made if absent"
    )
    parser.add_argument("--region", default=REGION, help=f"the deployment's (default: {REGION})")
    parser.add_argument("--model", default="smollm2-135m-instruct", metavar="SPEC")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The token is in the file named, or in HEADWORKS_ADMIN_TOKEN."""
    file = arguments.admin_token_file
    token = file.read_text().strip() if file else environ.get("HEADWORKS_ADMIN_TOKEN", "")
    try:
        manifest = pull_with_progress(arguments.model, arguments.models, Output())
        with Admin(arguments.control_plane, token) as admin:
            deployment = seed(admin, manifest, arguments.demo_key, region=arguments.region)
    except (ArtifactError, SeedError, httpx.HTTPError, OSError) as error:
        complain(str(error))
        return 1
    print(f"{manifest.name} {manifest.version} is deployed as {deployment}")
    return 0
