"""Goal: an admin, and nobody else, changes instances over HTTP."""

ADMIN = {"Authorization": "Bearer chief"}


def test_each_change_reaches_the_engine_and_is_answered_with_the_instances(serve_text):
    live = serve_text(admin_api_key=("chief",))

    def change(**body):
        return live.post("/instances", body, headers=ADMIN)

    assert change(action="role", instance="i", role="decode").ok
    assert change(action="drain", instance="i").ok
    assert change(action="undrain", instance="i").ok
    assert change(action="restart", instance="i", patience_s=2).ok
    assert change(action="restart").ok
    assert change(action="add", role="prefill").ok
    answer = change(action="remove", instance="i")
    assert [each["name"] for each in answer.json()["instances"]] == ["instance-0"]
    assert live.engine.changes == [
        ("role", "i", "decode"),
        ("drain", "i", True),
        ("drain", "i", False),
        ("restart", "i", 2.0),
        ("restart_all", 30.0),
        ("add", "prefill"),
        ("remove", "i", 30.0),
    ]
    for wrong in ({"action": "drain"}, {"action": "role", "instance": "i"}, {"action": "dance"}):
        assert live.post("/instances", wrong, headers=ADMIN).status_code == 400
    assert len(live.engine.changes) == 7


def test_only_an_admin_changes_instances(serve_text):
    live = serve_text(admin_api_key=("chief",))
    body = {"action": "drain", "instance": "i"}
    assert live.post("/instances", body).status_code == 401
    assert serve_text().post("/instances", body).status_code == 403
    assert live.get("/instances").json()["instances"][0]["role"] == "unified"
    assert live.engine.changes == []
