"""Goal: the rule grammar, its order and its bounds. Method: module lists by hand, no model."""

import pytest

from tandem.core.errors import ConfigError
from tandem.placement.rules import DEFAULT, ModuleInfo, assign_rules, parse_rules

LINEAR = ("torch.nn.modules.linear.Linear", ("torch.nn.modules.module.Module",))
MOE = ("transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock", ())
MODULES = [
    ModuleInfo("model", "transformers.X", ()),
    ModuleInfo("model.layers.0", "transformers.Layer", ()),
    ModuleInfo("model.layers.0.mlp", *MOE),
    ModuleInfo("model.layers.0.mlp.gate", *LINEAR),
    ModuleInfo("model.layers.0.mlp.experts", "transformers.Experts", ()),
    ModuleInfo("model.layers.0.mlp.experts.0", *LINEAR),
    ModuleInfo("model.layers.0.mlp_norm", "transformers.Norm", ()),
    ModuleInfo("lm_head", *LINEAR),
]


def assign(text: str):
    return assign_rules(MODULES, parse_rules(text, "rules.yaml"))


def test_first_match_wins_and_both_conditions_hold():
    table = assign(
        """
        - match: {name: "^lm_head$", class: torch.nn.Linear}
          replace: {class: A}
        - match: {class: torch.nn.Linear}
          replace: {class: B}
        - match: {name: "mlp", class: torch.nn.Linear}
          replace: {class: C}
        - match: {name: "gate"}
          replace: {}
        - match: {name: "nothing"}
          replace: {class: D}
        """
    )
    assert table.operator_of("lm_head") == "A"
    assert table.operator_of("model.layers.0.mlp.gate") == "B"
    assert table.operator_of("model.layers.0.mlp") == DEFAULT
    assert table.unused == (4,)
    assert table.shadowed == {2: (1,), 3: (1,)}


def test_not_recursive_leaves_children_but_not_siblings():
    table = assign(
        """
        - match: {name: "mlp\\\\.experts$"}
          replace: {class: E}
          recursive: false
        - match: {name: "experts|norm"}
          replace: {class: N}
        """
    )
    by_name = {a.module.name: a for a in table.assignments}
    assert by_name["model.layers.0.mlp.experts"].rule == 0
    assert by_name["model.layers.0.mlp.experts.0"].rule is None
    assert by_name["model.layers.0.mlp.experts.0"].skipped_by == 0
    assert by_name["model.layers.0.mlp_norm"].rule == 1


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ("torch.nn.Linear", True),
        ("torch.nn.modules.linear.Linear", True),
        ("torch.nn.modules.module.Module", True),
        ("Linear", True),
        ("ktransformers.models.modeling_x.Linear", True),
        ("ktransformers.models.modeling_x.LinEar", True),
        ("LinEar", False),
        ("other.package.Linear", False),
        ("torch.nn.Conv2d", False),
        ("Line", False),
    ],
)
def test_class_matching(wanted, fits):
    rules = parse_rules(f"- {{match: {{class: {wanted}}}, replace: {{class: X}}}}", "f")
    table = assign_rules([ModuleInfo("lm_head", *LINEAR)], rules)
    assert (table.operator_of("lm_head") == "X") is fits


def test_kwargs_are_kept_as_plain_values():
    (rule,) = parse_rules(
        """
- match: {name: "^model$"}
  replace:
    class: KDeepseekV2Model
    kwargs: {transfer_map: {30: "cuda:1"}, generate_device: cpu}
""",
        "f.yaml",
    )
    assert rule.kwargs == {"transfer_map": {30: "cuda:1"}, "generate_device": "cpu"}
    assert rule.place == "f.yaml:2"
    assert rule.recursive


def test_empty_file_is_no_rules():
    assert parse_rules("# nothing here\n", "f") == ()


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]"
    for old, new in zip("abcdefg", "bcdefgh", strict=True)
)

BROKEN = {
    "not yaml": ("- match: {name: [", "f:1", "not YAML"),
    "not a list": ("match: {name: a}", "f:1", "list of rules"),
    "no replace": ("- match: {name: a}", "f:1", "no `replace`"),
    "no match": ("\n\n- replace: {class: a}", "f:3", "no `match`"),
    "empty match": ("- match: {}\n  replace: {}", "f:1", "needs `name` or `class`"),
    "unknown key": ("- match: {name: a}\n  replace: {}\n  recurse: true", "f:3", "'recurse'"),
    "unknown match key": ("- match: {names: a}\n  replace: {}", "f:1", "'names'"),
    "twice": ("- match: {name: a, name: b}\n  replace: {}", "f:1", "given twice"),
    "name not text": ("- match: {name: 3}\n  replace: {}", "f:1", "must be a text"),
    "recursive not bool": (
        "- match: {name: a}\n  replace: {}\n  recursive: 1",
        "f:3",
        "true or false",
    ),
    "bad regex": ("- match: {name: 'a('}\n  replace: {}", "f:1", "not a regular expression"),
    "slow regex": ("- match: {name: '^(a+)+$'}\n  replace: {}", "f:1", "repeat within a repeat"),
    "slow regex, nested": ("- match: {name: '((a|b*)c)*'}\n  replace: {}", "f:1", "repeat within"),
    "many repeats": ("- match: {name: 'a*b*c*d*e*'}\n  replace: {}", "f:1", "5 repeats"),
    "long regex": ("- match: {name: " + "a" * 2000 + "}\n  replace: {}", "f:1", "1 to 1000"),
    "too many": ("- {match: {name: a}, replace: {}}\n" * 1001, "f:1", "1001 rules"),
    "deep": ("- match: " + "{name: " * 50 + "a" + "}" * 50, "f:1", "levels deep"),
    "bomb": (BOMB, "f:", "levels deep"),
    "python object": ("- !!python/object:os.system {}", "f:1", "no `match`"),
    "object in kwargs": (
        "- match: {name: a}\n  replace: {kwargs: {x: !!python/name:os.system ''}}",
        "f:2",
        "not YAML",
    ),
    "brackets": ("[" * 700, "f:0", "too deep"),
    "no value in kwargs": (
        "- match: {name: a}\n  replace: {kwargs: {x: 2020-13-45}}",
        "f:2",
        "is no timestamp",
    ),
    "big": ("#" * (1 << 20) + "#", "f", "characters"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_with_their_line(name):
    text, place, what = BROKEN[name]
    with pytest.raises(ConfigError) as caught:
        parse_rules(text, "f")
    assert place in str(caught.value)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "^model\\.layers\\.([0-9]|[12][0-9])\\.(?!mlp\\.gate$).*$",
        "(^model\\.layers\\.(4[5-9]|5[0-9]|60)\\.)|(^model\\.norm)|(^lm_head)",
        "^model\\.layers\\.(?!.*self_attn\\.kv_b_proj).*$",
        "[(*+]\\(+[^]*]x{2,3}(ab?)*",
    ],
)
def test_published_patterns_are_accepted(pattern):
    (rule,) = parse_rules(f"- match: {{name: '{pattern}'}}\n  replace: {{}}", "f")
    assert rule.name == pattern
