"""Normalised documents: filters in several languages, duplicates against brute force, bytes that repeat."""

import itertools
import json
import random
import unicodedata
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config.sections import NormalizeKeys
from headrace.data.clean import dedup, filters, minhash, normalize, words
from headrace.data.documents import SCHEMA, FilePart
from headrace.data.shards import write_json
from headrace.errors import UserError

GOOD = {
    "English": (
        "The mill stands where the stream bends, and its wheel has not turned for eighty years. "
        "Children fish from the broken race in summer; in winter the frozen spray hangs from the "
        "beams like glass. Nobody remembers who owned it last, though the parish register names "
        "three brothers and a widow."
    ),
    "Finnish": (
        "Mylly seisoo joen mutkassa, eikä sen ratas ole pyörinyt kahdeksaankymmeneen vuoteen. "
        "Kesäisin lapset kalastavat rikkoutuneen vesirännin reunalta, ja talvella jäätyneet pisarat "
        "riippuvat hirsistä kuin lasi. Kukaan ei enää muista viimeistä omistajaa, vaikka seurakunnan "
        "kirjoissa mainitaan kolme veljestä."
    ),
    "Chinese": (
        "磨坊立在溪流转弯的地方，它的水轮已经八十年没有转动了。夏天，孩子们在破旧的水渠边钓鱼；冬天，"
        "冻住的水花像玻璃一样挂在横梁上。没有人记得最后的主人是谁，虽然教区的登记簿上写着三兄弟和一位"
        "寡妇的名字。村里的老人说，从前每到秋收，各家的车队都排在桥头，等着把新麦磨成面粉，一直排到山"
        "脚下的小庙。后来铁路修到了县城，机器磨坊便宜又快，来的人一年比一年少，最后连石磨也被搬走，做"
        "了学校门前的台阶。如今只有燕子每年春天回来，在屋檐下筑巢。"
    ),
    "Arabic": (
        "تقف الطاحونة حيث ينحني الجدول، ولم تدر عجلتها منذ ثمانين عاما. يصطاد الأطفال السمك صيفا من "
        "القناة المكسورة، وفي الشتاء يتدلى الرذاذ المتجمد من العوارض كأنه زجاج. لا أحد يتذكر آخر من "
        "ملكها، مع أن سجل القرية يذكر ثلاثة إخوة وأرملة عاشوا هنا قبل الحرب بزمن طويل."
    ),
    "Thai": (
        "โรงสีตั้งอยู่ตรงที่ลำธารเลี้ยวโค้ง และกังหันของมันไม่ได้หมุนมาแปดสิบปีแล้ว ในฤดูร้อนเด็กๆ "
        "มานั่งตกปลาริมรางน้ำที่พังทลาย ส่วนในฤดูหนาวละอองน้ำที่แข็งตัวห้อยลงมาจากคานราวกับแก้ว "
        "ไม่มีใครจำได้ว่าเจ้าของคนสุดท้ายคือใคร "
        "แม้ในทะเบียนของหมู่บ้านจะมีชื่อพี่น้องสามคนกับหญิงม่ายคนหนึ่ง"
    ),
    "Korean": (
        "방앗간은 개울이 굽이도는 곳에 서 있고, 그 물레바퀴는 여든 해 동안 돌지 않았다. 여름이면 "
        "아이들이 부서진 물길 옆에서 낚시를 하고, 겨울이면 얼어붙은 물보라가 들보에 유리처럼 "
        "매달린다. 마지막 주인이 누구였는지 기억하는 사람은 없지만 마을 장부에는 세 형제와 한 과부의 "
        "이름이 적혀 있다. 가을이면 수레가 다리까지 줄을 섰다고 노인들은 말한다. "
        "지금은 제비만 봄마다 돌아와 처마 밑에 둥지를 틀고, 맷돌은 학교 앞 디딤돌이 되어 "
        "아이들의 발에 닳아 간다."
    ),
    "code": Path(normalize.__file__).read_text(),
}
LETTERS = random.Random(1)
BAD = {
    "unreadable": "$$ ~~ %% ^& *( )! @# {} [] || <> " * 20,
    "digits": " ".join(str(1000 + 7 * k) for k in range(200)) + " total of all rows",
    "run of one character": GOOD["English"] + "=" * 400,
    "word length": "".join(LETTERS.choices("abcdefghijklmnopqrstuvwxyz", k=3000)),
    "hashtags": " ".join(f"#tag{a}{b} was here" for a, b in itertools.permutations("abcdefghijkl", 2)),
    "ellipses": "\n".join(f"{word} is only the beginning ..." for word in GOOD["English"].split()),
    "bullets": "\n".join(f"- {word} {k} {word[::-1]}" for k, word in enumerate(GOOD["Finnish"].split())),
    "repeated lines": GOOD["English"] + "\n" + "Click here to read more about it\n" * 12,
    "repeated paragraphs": "\n\n".join(
        [GOOD["Arabic"], GOOD["Korean"] + "\nand so on", GOOD["Korean"] + "\nand so on"]
    ),
    "repeated phrase": " ".join(f"cheap flights {word}" for word in GOOD["Finnish"].split()),
}


def array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def section(path: Path | str, **keys: object) -> SimpleNamespace:
    return SimpleNamespace(
        **dict(use="files", path=str(path), text_column="auto", id_column=None, meta_columns=None) | keys
    )


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path


def run(folder: Path, cfg: NormalizeKeys, policy: str = "stop", **sources: SimpleNamespace) -> list[dict]:
    folder.mkdir(exist_ok=True)
    units = normalize.list_source_parts(SimpleNamespace(sources=sources))
    return [part(unit, cfg, policy, folder) for unit in units]


def part(unit: normalize.SourcePart, cfg: NormalizeKeys, policy: str, folder: Path) -> dict:
    """Normalize as the stage does, with the summary next to the documents."""
    summary = normalize.normalize_part(unit, cfg, policy, folder)
    write_json(normalize.summary_path(folder, unit.number), summary)
    return summary


def without_duplicates(
    folder: Path, cfg: NormalizeKeys, policy: str = "stop", **sources: SimpleNamespace
) -> dedup.DuplicateRows:
    """Also leaves the documents that stay in folder/out."""
    run(folder, cfg, policy, **sources)
    found = dedup.find_duplicates(
        folder, normalize.list_source_parts(SimpleNamespace(sources=sources)), cfg, policy
    )
    (folder / "out").mkdir()
    for number, rows in found.rows.items():
        made = dedup.remove_rows(number, rows, found.counts[number], folder, folder / "out")
        write_json(normalize.summary_path(folder / "out", number), made)
    return found


def ids(folder: Path) -> list[str]:
    return [id for file in sorted(folder.glob("*.parquet")) for id in pq.read_table(file)["id"].to_pylist()]


def total(found: dedup.DuplicateRows) -> Counter[str]:
    return sum((Counter(counts) for counts in found.counts.values()), Counter())


@pytest.mark.parametrize("language", GOOD)
def test_good_text_of_any_language_passes_every_rule(language: str) -> None:
    assert len(GOOD[language]) >= filters.MIN_CHARACTERS
    for text in (
        GOOD[language],
        GOOD[language][:40],
        "\n\n".join([GOOD[language], GOOD["Finnish" if language == "English" else "English"], "The end."]),
    ):
        assert not [rule for rule, bad in filters.find_low_quality(array([text])).items() if bad[0]]


@pytest.mark.parametrize("rule", filters.RULES)
def test_each_rule_finds_the_text_it_is_meant_for(rule: str) -> None:
    assert filters.find_low_quality(array([GOOD["English"], BAD[rule], GOOD["Chinese"]]))[rule].tolist() == [
        False,
        True,
        False,
    ]


def test_repetition_is_found_where_no_spaces_are() -> None:
    assert filters.find_low_quality(array([GOOD["Chinese"] + "点击这里" * 60]))["repeated phrase"][0]


def test_a_text_is_filtered_the_same_in_any_batch() -> None:
    texts = [*GOOD.values(), *BAD.values(), "", "\n", "a", " é ", "👍🏽" * 5] * 3
    together = filters.find_low_quality(array(texts))
    for number, text in enumerate(texts):
        alone = filters.find_low_quality(array([text]))
        assert {rule: bad[0] for rule, bad in alone.items()} == {
            rule: bad[number] for rule, bad in together.items()
        }


def test_measures_are_those_of_a_plain_count() -> None:
    texts = [*GOOD.values(), *BAD.values(), "one\n two\n\none\n", "ä ä", "…"]
    block = next(words.iter_blocks(array(texts), 1 << 20))
    measures = filters.measure_block(block)
    for number, text in enumerate(texts):
        assert measures.characters[number] == len(text)
        kinds = [unicodedata.category(character)[0] for character in text]
        spaces = sum(character.isspace() for character in text)
        readable = sum(kind in "LMN" for kind in kinds) + spaces
        assert measures.readable[number] == pytest.approx(readable / len(text))
        assert measures.digits[number] == pytest.approx(kinds.count("N") / (len(text) - spaces))
        runs = [len(list(run)) for character, run in itertools.groupby(text) if not character.isspace()]
        assert measures.run[number] == max(runs)
        if not np.isnan(measures.word_length[number]):
            assert measures.word_length[number] == pytest.approx(
                np.mean([len(word) for word in text.split()])
            )
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        again = sum(len(line) for k, line in enumerate(lines) if line in lines[:k])
        assert measures.lines[number] == pytest.approx(again / sum(map(len, lines)))
        assert measures.ellipses[number] == pytest.approx(
            np.mean([line.endswith(("...", "…")) for line in lines])
        )
    assert np.isnan(measures.word_length).tolist()[:5] == [False, False, True, False, True]


def test_empty_short_and_long_documents_are_counted_apart() -> None:
    texts = array(["", " \n\t", "\u3000\u00a0", "ääää", "ääääää", "x" * 20])
    keep, dropped = filters.select_texts(texts, NormalizeKeys(min_chars=5, max_chars=10))
    assert keep.tolist() == [False, False, False, False, True, False]
    assert dropped == {"empty": 3, "too short": 1, "too long": 1}


def test_blocks_hold_every_byte_and_cut_no_character() -> None:
    texts = [*GOOD.values(), "", "ä" * 1000, "👍" * 500, "", "a"]
    for size in (4, 5, 7, 64, 1000, 1 << 20):
        for skipped in (0, 3):
            found = [""] * len(texts)
            for block in words.iter_blocks(array(texts)[skipped:], size):
                assert len(block.data) <= size + 3
                for k, text in enumerate(block.text_indices):
                    found[skipped + text] += bytes(
                        block.data[block.offsets[k] : block.offsets[k + 1]]
                    ).decode()
            assert found[skipped:] == texts[skipped:]


def reference_shingles(text: str) -> set[tuple[str, ...]]:
    found = "".join(c if not c.isascii() or c.isalnum() or c == "_" else " " for c in text).lower().split()
    return {tuple(found[k : k + 5]) for k in range(max(1, len(found) - 4))}


def test_signatures_estimate_the_jaccard_index() -> None:
    chance = random.Random(0)
    texts, expected = [], []
    for _ in range(150):
        first = [f"word{chance.randrange(5000)}" for _ in range(400)]
        second = first.copy()
        for _ in range(chance.randrange(60)):
            second[chance.randrange(400)] = "CHANGED"
        pair = [" ".join(first), ",  ".join(second).upper()]
        one, other = map(reference_shingles, pair)
        expected.append(len(one & other) / len(one | other))
        texts += pair
    signed = minhash.minhash_signatures(array(texts))
    errors = np.mean(signed[::2] == signed[1::2], axis=1) - expected
    assert abs(errors.mean()) < 0.01
    assert 0.02 < errors.std() < 0.045  # sqrt(j (1 - j) / 128) is 0.044 at most


def test_signatures_do_not_hang_on_the_texts_around() -> None:
    texts = [
        *GOOD.values(),
        "!!!",
        "a",
        "one two",
        "long " + "word " * 100_000,
        "é" * 300_000,
        BAD["digits"],
        BAD["word length"],
    ]
    together = minhash.minhash_signatures(array(texts))
    alone = np.concatenate([minhash.minhash_signatures(array([text])) for text in texts])
    np.testing.assert_array_equal(together, alone)
    assert len(np.unique(together, axis=0)) == len(texts)


def test_near_duplicates_are_those_that_brute_force_finds(tmp_path: Path) -> None:
    """300 families of a text and three copies, each with more words changed than the last."""
    chance = random.Random(2)
    texts = []
    for _ in range(300):
        base = [f"w{chance.randrange(20_000)}" for _ in range(300)]
        texts.append(" ".join(base))
        for changes in (1, 3, 20):
            copy = base.copy()
            for place in chance.sample(range(300), changes):
                copy[place] = f"x{chance.randrange(20_000)}"
            texts.append(" ".join(copy))
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    found = without_duplicates(tmp_path / "out", NormalizeKeys(dedup_jaccard=0.8), a=section(path))
    removed = set(found.rows[0].tolist())
    shingles = [reference_shingles(text) for text in texts]
    near: set[int] = set()
    far: set[int] = set()
    for number in range(len(texts)):
        family = range(number - number % 4, number)
        most = max(
            (len(shingles[number] & shingles[k]) / len(shingles[number] | shingles[k]) for k in family),
            default=0,
        )
        (near if most >= 0.9 else far if most < 0.7 else set()).add(number)
    assert len(near) > 450 and len(far) > 550
    assert not removed & far
    assert len(removed & near) >= 0.99 * len(near)
    assert total(found) == {"near duplicate": len(removed)}


def test_characters_make_shingles_where_spaces_are_rare(tmp_path: Path) -> None:
    copy = GOOD["Chinese"].replace("八十年", "九十年")
    other = "今天的天气很好，我们决定一起去公园散步，顺便看看新开的花店里有什么好看的花，然后回家吃饭。"
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in (GOOD["Chinese"], other, copy)])
    found = without_duplicates(tmp_path / "out", NormalizeKeys(dedup_jaccard=0.8), a=section(path))
    assert found.rows[0].tolist() == [2]


def test_texts_without_words_are_near_nothing_but_themselves(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in ("!!!", "???", "a b", "a b c", "!!!")])
    found = without_duplicates(tmp_path / "out", NormalizeKeys(dedup_jaccard=0.8), a=section(path))
    assert found.rows[0].tolist() == [4]


def test_of_equal_texts_the_first_of_all_sources_is_kept(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"text": text} for text in ("one", "two", "one")])
    b = write(tmp_path / "b.jsonl", [{"text": text} for text in ("two", "three", "Two", "three", "\n")])
    found = without_duplicates(tmp_path / "out", NormalizeKeys(dedup_exact=True), a=section(a), b=section(b))
    assert {number: rows.tolist() for number, rows in found.rows.items()} == {0: [2], 1: [0, 3]}
    assert total(found) == {"exact duplicate": 3}
    summary = json.loads((tmp_path / "out" / "out" / "00001.json").read_text())
    assert summary["dropped"] == {"empty": 1, "exact duplicate": 2}
    assert (summary["documents_read"], summary["documents"], summary["bytes"]) == (5, 2, 8)


def test_equal_texts_are_found_in_any_number_of_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    texts = [str(chance.randrange(1000)) for _ in range(2000)]
    expected = [number for number, text in enumerate(texts) if text in texts[:number]]
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    run(tmp_path / "out", NormalizeKeys(dedup_exact=True), a=section(path))
    for size in (1 << 22, 1000, 100):
        monkeypatch.setattr(dedup, "PARTITION_ROWS", size)
        units = normalize.list_source_parts(SimpleNamespace(sources={"a": section(path)}))
        found = dedup.find_duplicates(tmp_path / "out", units, NormalizeKeys(dedup_exact=True), "stop")
        assert found.rows[0].tolist() == expected


def test_a_duplicate_id_stops_or_is_skipped(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"key": k, "text": t} for k, t in (("p", "1"), ("q", " "), ("r", "2"))])
    (tmp_path / "b").mkdir()
    for name, keys in (("x", "st"), ("y", "urs")):
        write(tmp_path / "b" / f"{name}.jsonl", [{"key": key, "text": key + name} for key in keys])
    sources: dict[str, Any] = dict(a=section(a, id_column="key"), b=section(tmp_path / "b", id_column="key"))
    with pytest.raises(
        UserError,
        match=r"document 5 of .*x\.jsonl.*: the id 's' is also that of document 1 of .*on_error: skip",
    ):
        without_duplicates(tmp_path / "stop", NormalizeKeys(), **sources)
    found = without_duplicates(tmp_path / "skip", NormalizeKeys(), "skip", **sources)
    assert found.problems["counts"] == {"duplicate id": 1}
    assert ids(tmp_path / "skip" / "out") == ["p", "r", "s", "t", "u", "r"]  # each source by itself


def test_what_goes_for_its_id_is_no_reason_for_another_to_go(tmp_path: Path) -> None:
    records = [{"key": key, "text": text} for key, text in (("a", "first"), ("a", "second"), ("b", "second"))]
    sources = dict(a=section(write(tmp_path / "a.jsonl", records), id_column="key"))
    without_duplicates(
        tmp_path / "out", NormalizeKeys(dedup_exact=True, dedup_jaccard=0.8), "skip", **sources
    )
    assert pq.read_table(tmp_path / "out" / "out" / "00000.parquet")["text"].to_pylist() == [
        "first",
        "second",
    ]


def test_deduplication_does_not_depend_on_how_files_are_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(4)
    texts = []
    for number in range(200):
        text = " ".join(f"w{chance.randrange(3000)}" for _ in range(100))
        texts += [text, f"{text} again"] if number % 3 else [text, text]
    chance.shuffle(texts)
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    cfg, kept = NormalizeKeys(dedup_exact=True, dedup_jaccard=0.8), []
    for number, cuts in enumerate(([], [50_000], [1000, 30_000, 90_000])):
        edges: list[Any] = [0, *cuts, None]
        parts = [FilePart(str(path), start, stop) for start, stop in itertools.pairwise(edges)]
        units = [normalize.SourcePart(k, "a", section(path), part) for k, part in enumerate(parts)]
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "out").mkdir()
        for unit in units:
            part(unit, cfg, "stop", folder)
        found = dedup.find_duplicates(folder, units, cfg, "stop")
        for unit in units:
            dedup.remove_rows(
                unit.number, found.rows[unit.number], found.counts[unit.number], folder, folder / "out"
            )
        kept.append(ids(folder / "out"))
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) == 200


def test_the_bytes_are_the_same_every_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in [*GOOD.values(), *BAD.values()] * 2])
    cfg = NormalizeKeys(unicode="nfc", dedup_exact=True, dedup_jaccard=0.8, quality_filter=True)
    for name in "xy":
        without_duplicates(tmp_path / name, cfg, a=section(path))
    files = sorted(file.relative_to(tmp_path / "x") for file in (tmp_path / "x").rglob("*") if file.is_file())
    assert len(files) == 7  # two Parquet files, two summaries, and keys of duplicates
    for file in files:
        assert (tmp_path / "x" / file).read_bytes() == (tmp_path / "y" / file).read_bytes()


def test_removing_gives_the_bytes_of_a_part_that_never_had_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalize, "ROW_GROUP", 5000)
    texts = [f"{number} {text}" for number in range(30) for text in GOOD.values()]
    repeated = [text for text in texts for _ in range(2)]
    tables = [
        pa.table(
            {name: pa.array(column, SCHEMA.field(name).type) for name, column in columns.items()},
            schema=SCHEMA,
        )
        for part in (texts, repeated)
        for columns in [
            dict(
                id=part,
                text=part,
                messages=[None] * len(part),
                source=["a"] * len(part),
                meta=[None] * len(part),
            )
        ]
    ]
    for number, table in enumerate(tables):
        with (tmp_path / f"{number}.parquet").open("wb") as file:
            assert normalize.write_documents(file, [table]).documents == len(table)
    rows = np.arange(1, len(repeated), 2)
    with (tmp_path / "again.parquet").open("wb") as file:
        normalize.write_documents(file, dedup.read_without_rows(tmp_path / "1.parquet", rows))
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "0.parquet").read_bytes()
    assert pq.ParquetFile(tmp_path / "0.parquet").num_row_groups > 10


def test_conversations_are_filtered_by_their_contents(tmp_path: Path) -> None:
    def chat(*messages: str) -> dict:
        roles = itertools.cycle(["user", "assistant"])
        return {
            "messages": [
                {"role": role, "content": content} for role, content in zip(roles, messages, strict=False)
            ]
        }

    records = [
        chat("Hello?", "Good morning, what is it?"),
        chat(" ", "\n"),
        chat("a", "b"),
        chat(BAD["digits"], "yes"),
    ]
    path = write(tmp_path / "a.jsonl", records)
    [summary] = run(tmp_path / "out", NormalizeKeys(min_chars=10, quality_filter=True), a=section(path))
    assert summary["dropped"] == {"empty": 1, "too short": 1, "digits": 1}
    table = pq.read_table(tmp_path / "out" / "00000.parquet")
    assert table["text"].to_pylist() == [None]
    assert json.loads(table["messages"][0].as_py()) == records[0]["messages"]


@pytest.mark.parametrize("form", ["nfc", "nfkc"])
def test_unicode_is_normalised_in_text_and_inside_messages(tmp_path: Path, form: Any) -> None:
    hostile = [
        "e\u0301",
        "line\n\u0301accent",
        "\uff02quoted\uff02 \ufb01",
        "\\\u0301",
        "plain",
        "\u1e9b\u0323",
    ]
    expected = [unicodedata.normalize(form.upper(), text) for text in hostile]
    a = write(tmp_path / "a.jsonl", [{"text": text} for text in hostile])
    b = write(
        tmp_path / "b.jsonl",
        [
            {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": "ok"}]}
            for t in hostile
        ],
    )
    run(tmp_path / "out", NormalizeKeys(unicode=form), a=section(a), b=section(b))
    assert pq.read_table(tmp_path / "out" / "00000.parquet")["text"].to_pylist() == expected
    chats = pq.read_table(tmp_path / "out" / "00001.parquet")["messages"].to_pylist()
    assert [json.loads(chat)[0]["content"] for chat in chats] == expected


def test_units_number_the_parts_of_all_sources_in_order(tmp_path: Path) -> None:
    for name in ("z", "a"):
        write(tmp_path / f"{name}.jsonl", [{"text": name}])
    summaries = run(
        tmp_path / "out",
        NormalizeKeys(),
        last=section(tmp_path / "z.jsonl"),
        first=section(tmp_path / "a.jsonl"),
    )
    assert [(summary["number"], summary["source"]) for summary in summaries] == [(0, "last"), (1, "first")]
    table = pq.read_table(tmp_path / "out" / "00001.parquet")
    assert table.schema.equals(SCHEMA)
    assert table["source"].to_pylist() == ["first"]


def test_a_part_of_nothing_gives_a_file_of_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": " "}, {"text": ""}])
    found = without_duplicates(
        tmp_path / "out",
        NormalizeKeys(dedup_exact=True, dedup_jaccard=0.8, quality_filter=True),
        a=section(path),
    )
    assert found.rows[0].tolist() == []
    assert len(pq.read_table(tmp_path / "out" / "out" / "00000.parquet")) == 0


def test_bad_input_is_counted_in_the_summary_and_a_failed_part_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\nnot json\n{"text": "fine"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl"):
        run(tmp_path / "stop", NormalizeKeys(dedup_exact=True), a=section(path))
    assert not list((tmp_path / "stop").iterdir())
    [summary] = run(tmp_path / "skip", NormalizeKeys(dedup_exact=True), "skip", a=section(path))
    assert summary["documents"] == 2
    assert sum(summary["problems"]["counts"].values()) == 1
