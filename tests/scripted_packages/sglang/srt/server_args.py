"""A command line as `ServerArgs`."""

import argparse
import dataclasses

from tests.unit.sglang.scripted import ServerArgs


def prepare_server_args(argv: list[str]) -> ServerArgs:
    parser = argparse.ArgumentParser(prog="sglang serve")
    for field in dataclasses.fields(ServerArgs):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            kind = int if "int" in str(field.type) else str
            parser.add_argument(flag, default=field.default, type=kind)
    return ServerArgs(**vars(parser.parse_args(argv)))
