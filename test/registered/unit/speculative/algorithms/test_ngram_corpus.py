"""The trie and its trees, against a reference that keeps n-grams as tuples in a plain dict."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.speculative.algorithms.ngram_corpus import NgramCorpus
from sglang.srt.speculative.algorithms.ngram_tree import MatchType, NgramTrees


class Reference:
    """n-gram -> [count, time of its last walk]; within a walk the longer n-gram is the earlier."""

    def __init__(self, max_depth, capacity):
        self.max_depth, self.capacity, self.time, self.held = max_depth, capacity, 0, {}

    def insert(self, token_ids, num_new):
        first_new = len(token_ids) - num_new
        for start in range(max(0, first_new - self.max_depth + 1), len(token_ids)):
            ends = range(start + 1, min(start + self.max_depth, len(token_ids)) + 1)
            for end in reversed(ends):
                self.time += 1
                gram = tuple(token_ids[start:end])
                if gram not in self.held:
                    self.held[gram] = [1, self.time]
                else:
                    self.held[gram][0] += end > first_new
                    self.held[gram][1] = self.time
            while len(self.held) > self.capacity:
                del self.held[min(self.held, key=lambda gram: self.held[gram][1])]

    def children(self, gram):
        """(token, share) by the time of the last walk, the latest first."""
        found = [g for g in self.held if g[:-1] == gram and len(g) == len(gram) + 1]
        total = sum(self.held[g][0] for g in found)
        found.sort(key=lambda g: -self.held[g][1])
        return [(g[-1], self.held[g][0] / total) for g in found]

    def paths(self, token_ids, num_nodes, match_type, breadth_of):
        """The continuations in a tree in the order they are found, as tuples."""
        found = []
        anchors = [
            tuple(token_ids[-length:])
            for length in range(min(self.max_depth - 1, len(token_ids)), 0, -1)
            if tuple(token_ids[-length:]) in self.held
        ]

        def continuations(anchor, path):
            gram = anchor + path
            if len(gram) == self.max_depth:
                return []
            return [((*path, token), part) for token, part in self.children(gram)[: breadth_of(len(gram))]]

        if match_type is MatchType.BFS:
            for anchor in anchors:
                level = [()]
                while level:
                    level = [path for above in level for path, _ in continuations(anchor, above)]
                    found += level
        else:
            open_paths = [(a, path, part) for a in anchors for path, part in continuations(a, ())]
            while open_paths and len(set(found)) < num_nodes:
                # max() takes the first of equals, and of equals the longer anchor goes first.
                anchor, path, share = max(open_paths, key=lambda entry: (entry[2], len(entry[0])))
                open_paths.remove((anchor, path, share))
                found.append(path)
                open_paths += [(anchor, p, share * part) for p, part in continuations(anchor, path)]
        return list(dict.fromkeys(found))[: num_nodes - 1]

    def propose(self, token_ids, num_nodes, match_type, breadth_of):
        paths = self.paths(token_ids, num_nodes, match_type, breadth_of)
        order = [()]
        for above in order:
            order += [path for path in paths if path[:-1] == above]
            if above == ():
                order += [("padding",)] * (num_nodes - 1 - len(paths))
        token_ids = [token_ids[-1], *(0 if path == ("padding",) else path[-1] for path in order[1:])]
        return token_ids, [-1, *(order.index(path[:-1]) for path in order[1:])]


def pair(max_depth=4, capacity=1000):
    return NgramCorpus(max_depth=max_depth, capacity=capacity), Reference(max_depth, capacity)


def trees_of(corpus, match_type=MatchType.BFS, num_nodes=6, min_breadth=1, max_breadth=4):
    return NgramTrees(
        corpus, num_nodes=num_nodes, match_type=match_type, min_breadth=min_breadth, max_breadth=max_breadth
    )


def all_held(corpus, node=0, gram=()):
    """Every n-gram that is reached from the root."""
    for child, token_id, _ in corpus.children(node, 10**9):
        yield (*gram, token_id)
        yield from all_held(corpus, child, (*gram, token_id))


def check_held(corpus, reference):
    """What is reached from the root is all there is, and it is what the reference holds."""
    held = list(all_held(corpus))
    assert len(held) == len(set(held)) == len(corpus) <= reference.capacity
    assert set(held) == set(reference.held)


def linear(min_breadth, max_breadth, max_depth):
    """Breadth after an n-gram: falls from the largest after one token to the smallest after the longest."""

    def breadth(length):
        fallen = (max_breadth - min_breadth) * (length - 1) / max(max_depth - 2, 1)
        return max_breadth - int(fallen + 1e-9)

    return breadth


def rounds(seed):
    """What is inserted while two texts of few tokens grow in turn: (window, num_new)."""
    rng = random.Random(seed)
    texts = [[], []]
    for _ in range(rng.randint(1, 30)):
        text = texts[rng.randint(0, 1)]
        # At times tokens that nobody counts, as a prompt's are.
        text += [rng.randint(0, 3) for _ in range(rng.choice([0, 0, 0, 3]))]
        num_new = rng.randint(1, 4)
        text += [rng.randint(0, 3) for _ in range(num_new)]
        yield list(text), num_new


@given(st.integers(0, 2**31), st.integers(2, 5), st.integers(5, 80), st.integers(2, 14), st.data())
def test_the_trie_and_its_trees_are_what_the_reference_says(seed, max_depth, capacity, num_nodes, data):
    """Within a capacity that evicts or does not."""
    corpus, reference = pair(max_depth, capacity)
    min_breadth = data.draw(st.integers(1, 3))
    max_breadth = data.draw(st.integers(min_breadth, 5))
    breadth_of = linear(min_breadth, max_breadth, max_depth)
    for inserted, num_new in rounds(seed):
        corpus.insert(inserted, num_new)
        reference.insert(inserted, num_new)
        check_held(corpus, reference)
    contexts = [[token_id] for token_id in range(4)] + [
        inserted,
        inserted[:-1],
        inserted[: len(inserted) // 2],
    ]
    for match_type in MatchType:
        trees = trees_of(corpus, match_type, num_nodes, min_breadth, max_breadth)
        for context in filter(None, contexts):
            expected = reference.propose(context, num_nodes, match_type, breadth_of)
            assert trees.propose(context) == expected


class NoRenewal(OrderedDict):
    """Offender: n-grams go in the order they came, so a beginning goes before what follows it."""

    def move_to_end(self, key, last=True):
        pass


class NewestOut(OrderedDict):
    """Offender: what was walked last goes first."""

    def popitem(self, last=True):
        return super().popitem(last=not last)


@pytest.mark.parametrize("offender", [NoRenewal, NewestOut])
def test_an_eviction_in_the_wrong_order_is_noticed(offender):
    corpus, reference = pair(max_depth=3, capacity=7)
    for inserted in ([1, 2, 3], [1, 2, 4], [5, 2, 3]):
        corpus.insert(inserted, 1)
        reference.insert(inserted, 1)
    check_held(corpus, reference)
    corpus, reference = pair(max_depth=3, capacity=7)
    corpus._node_of = offender()
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for inserted in ([1, 2, 3], [1, 2, 4], [5, 2, 3]):
            corpus.insert(inserted, 1)
            reference.insert(inserted, 1)
            check_held(corpus, reference)


def test_the_latest_continuation_comes_first_by_level_and_the_most_frequent_by_share():
    corpus, _ = pair(max_depth=2)
    for follower in (7, 7, 8, 9):
        corpus.insert([1, follower], 1)
    assert trees_of(corpus, num_nodes=4).propose([1]) == ([1, 9, 8, 7], [-1, 0, 0, 0])
    assert trees_of(corpus, MatchType.PROB, num_nodes=3).propose([1]) == ([1, 7, 9], [-1, 0, 0])


def test_the_longer_end_of_the_text_goes_first_and_equal_continuations_are_one_node():
    corpus, _ = pair(max_depth=3)
    corpus.insert([1, 2, 3], 3)
    corpus.insert([9, 2, 4], 3)
    assert trees_of(corpus, num_nodes=3).propose([1, 2]) == ([2, 3, 4], [-1, 0, 0])
    assert trees_of(corpus, num_nodes=3).propose([9, 2]) == ([2, 4, 3], [-1, 0, 0])
    assert trees_of(corpus, num_nodes=3).propose([5, 2]) == ([2, 4, 3], [-1, 0, 0])


def test_a_tree_is_filled_with_dummies_under_the_root_in_breadth_first_order():
    corpus, _ = pair(max_depth=4)
    assert trees_of(corpus, num_nodes=4).propose([5]) == ([5, 0, 0, 0], [-1, 0, 0, 0])
    corpus.insert([5, 6, 7], 3)
    assert trees_of(corpus, num_nodes=5).propose([5]) == ([5, 6, 0, 0, 7], [-1, 0, 0, 0, 1])


def test_breadth_falls_from_the_first_token_to_the_longest_n_gram():
    """Five after one token, three after two, one after three; the shorter n-grams saw other text later."""
    corpus, _ = pair(max_depth=4)
    for before, followers in (([1, 2, 3], (10, 11)), ([9, 2, 3], range(20, 24)), ([3], range(30, 36))):
        for follower in followers:
            corpus.insert([*before, follower], 1)
    token_ids, parents = trees_of(corpus, num_nodes=12, min_breadth=1, max_breadth=5).propose([1, 2, 3])
    assert token_ids == [3, 11, 23, 22, 21, 35, 34, 33, 32, 31, 0, 0] and set(parents[1:]) == {0}


def test_an_n_gram_counts_once_however_often_its_text_is_shown():
    """Each round shows the newest tokens again; counted again, shares would follow the pace of rounds."""
    corpus, _ = pair(max_depth=3)
    corpus.insert([1, 2], 2)
    for end in range(3, 9):
        corpus.insert([1, 2, 3, 4, 5, 6, 7, 8][:end], 1)
    corpus.insert([1, 9], 1)
    anchor, _ = corpus.anchors([1])[0]
    assert [(t, share) for _, t, share in corpus.children(anchor, 9)] == [(9, 0.5), (2, 0.5)]


def test_a_proposal_leaves_no_trace():
    """Ranks that insert the same must propose the same, whatever each has proposed before."""
    asked, silent = (pair(max_depth=3, capacity=9)[0] for _ in range(2))
    text = [1, 2, 1, 3, 1, 2, 4, 1, 3, 2, 2, 1, 4]
    for end in range(1, len(text) + 1):
        for corpus in (asked, silent):
            corpus.insert(text[:end], 1)
        for match_type in MatchType:
            for token_id in range(5):
                trees_of(asked, match_type).propose([token_id])
        assert list(all_held(asked)) == list(all_held(silent))


def test_a_context_shorter_or_longer_than_the_trie_is_matched_as_far_as_it_goes():
    corpus, _ = pair(max_depth=3)
    corpus.insert([1, 2, 3], 3)
    assert [length for _, length in corpus.anchors([2])] == [1]
    assert [length for _, length in corpus.anchors([7, 8, 9, 1, 2])] == [2, 1]
    assert corpus.anchors([3]) == corpus.anchors([9]) == corpus.anchors([]) == []


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: pair(max_depth=1), "--speculative-ngram-max-trie-depth must be 2 or more"),
        (lambda: pair(max_depth=18, capacity=17), "n-gram of 18 tokens, and is 17"),
        (lambda: trees_of(pair()[0], num_nodes=1), "--speculative-num-draft-tokens must be 2 or more"),
        (lambda: trees_of(pair()[0], min_breadth=0), "they are 0 and 4"),
        (lambda: trees_of(pair()[0], min_breadth=5), "they are 5 and 4"),
    ],
)
def test_what_cannot_hold_or_propose_anything_is_refused(build, says):
    with pytest.raises(ValueError, match=says):
        build()
