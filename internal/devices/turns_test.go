package devices

import (
	"strings"
	"testing"
)

// Callers take turns, calls of one caller keep their order, and the caller with the most
// calls makes room when there is none.
func TestTurns(t *testing.T) {
	const most = 6
	for _, tc := range []struct {
		name, calls  string // a letter for each call: its caller
		order        string // callers, in the order in which they come
		refused, out int    // at once; later, to make room
	}{
		{"one caller", "aaaa", "aaaa", 0, 0},
		{"one caller fills it", "aaaaaaaa", "aaaaaa", 2, 0},
		{"the first call of another is second", "aaaab", "abaaa", 0, 0},
		{"two in turn", "aaabbb", "ababab", 0, 0},
		{"room is made", "aaaaaab", "abaaaa", 0, 1},
		{"until it is shared alike", "aaaaaabbbbb", "ababab", 2, 3},
		{"three callers", "aaaaaabbbc", "abcaba", 0, 4},
		{"everybody has one", "abcdefg", "abcdef", 1, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var q Turns
			var channels []chan bool
			var callers []string
			refused := 0
			for caller := range strings.SplitSeq(tc.calls, "") {
				if ready := q.Add(caller, most); ready == nil {
					refused++
				} else {
					channels, callers = append(channels, ready), append(callers, caller)
				}
			}
			out := 0
			taken := make([]bool, len(channels))
			for i, ready := range channels {
				if len(ready) == 1 {
					taken[i] = true
					out++
					if <-ready {
						t.Error("a call that makes room has the turn")
					}
				}
			}
			order, last := "", map[string]int{}
			for q.Next() {
				for i, ready := range channels {
					if !taken[i] && len(ready) == 1 && <-ready {
						if taken[i] = true; last[callers[i]] > i {
							t.Errorf("call %d of %s comes late", i, callers[i])
						}
						order, last[callers[i]] = order+callers[i], i
					}
				}
			}
			// security: K16
			if order != tc.order || refused != tc.refused || out != tc.out || q.Len() != 0 {
				t.Errorf("order %s, %d refused, %d made room; want %s, %d, %d", order, refused, out, tc.order, tc.refused, tc.out)
			}
		})
	}
}

// A call that is taken back moves those of its caller up; the end closes the rest.
func TestTurnsTakenBack(t *testing.T) {
	var q Turns
	first := q.Add("a", 9)
	second, other := q.Add("a", 9), q.Add("b", 9)
	if !q.Remove(first) || q.Remove(first) {
		t.Error("a call is taken back once")
	}
	if !q.Next() || len(other) != 1 { // it was before the second of a
		t.Error("b was next")
	}
	q.Close()
	if _, open := <-second; open || q.Len() != 0 || q.Next() {
		t.Error("the rest still waits")
	}
}
