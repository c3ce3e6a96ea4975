"""The command lines and the environment of a stack."""

from benchmarks.stacks import HOST, Implementation, Recipe, read_series, stack_environment

MINE, PEER = Implementation("ours", "/mine/python", "0"), Implementation("theirs", "/peer/python", "1000000")


def commands(recipe):
    return [(role, " ".join(command)) for role, command in recipe.commands(9000, "model")]


def test_infinite_speedup_has_the_flag_of_each_mocker():
    ((_, frontend), (_, engine)) = commands(Recipe(name="x", frontend=MINE, engine=PEER))
    assert frontend.startswith("/mine/python -m dynamo.frontend")
    assert engine.startswith("/peer/python -m dynamo.mocker")
    assert engine.endswith("--speedup-ratio 1000000")
    assert commands(Recipe(name="x", frontend=MINE, engine=MINE))[1][1].endswith("--speedup-ratio 0")


def test_finite_speedup_has_the_same_flag_for_both():
    for implementation in (MINE, PEER):
        assert commands(Recipe(name="x", frontend=implementation, engine=implementation, speedup=1.0))[1][1].endswith(
            "--speedup-ratio 1"
        )


def test_every_worker_is_a_process():
    assert [role for role, _ in commands(Recipe(name="x", frontend=MINE, engine=MINE, workers=2))] == [
        "frontend",
        "engine",
        "engine",
    ]


def test_cluster_variables_of_the_caller_are_removed_from_the_environment(tmp_path):
    caller = {"PATH": "/bin", "DYN_NAMESPACE": "prod", "ETCD_ENDPOINTS": "http://etcd", "PYTHONPATH": "/x"}
    env = stack_environment(str(tmp_path), caller)
    assert env["PATH"] == "/bin"
    assert not {"DYN_NAMESPACE", "ETCD_ENDPOINTS", "PYTHONPATH"} & set(env)
    assert env["DYN_FILE_KV"].startswith(str(tmp_path))
    assert env["DYN_TCP_RPC_HOST"] == HOST


def test_router_mode_and_engine_program_are_read_from_the_recipe():
    recipe = Recipe(
        name="x", frontend=PEER, engine=MINE, router_mode="kv", program="engine.py", engine_flags=["--beat"]
    )
    ((_, frontend), (_, engine)) = commands(recipe)
    assert frontend.endswith("--router-mode kv")
    assert engine == "/mine/python engine.py --model-path model --model-name bench --beat"


def test_metrics_page_is_parsed_by_series():
    page = '# HELP a of it\n# TYPE a counter\na 3\nb{model="x y",le="+Inf"} 0.5\n'
    assert read_series(page) == {"a": 3.0, 'b{model="x y",le="+Inf"}': 0.5}
