package main

import (
	"strings"
	"testing"
)

// A list fits into the terminal, whatever devices are called; in a pipe nothing is cut.
func TestTable(t *testing.T) {
	rows := [][]string{
		{"ID", "NAME", "STATE", "TRANSPORT", "BOARD", "FIRMWARE", "TOOLS", "LAST SEEN"},
		{"aa:bb:cc:dd:ee:01", "厨房的灯", "online", "websocket", "bread-compact-wifi-lcd", "2.2.6", "12", "now"},
		{"aa:bb:cc:dd:ee:02", "the long name of a lamp on the second floor", "offline (superseded)", "mqtt", "esp-box-3", "2.4.2-rc1", "3 (partial)", "12d ago"},
		{"aa:bb:cc:dd:ee:03", "e\u0301te\u0301\x1b[31m", "online", "mqtt", "x", "1", "0", "now"},
	}
	a, _, _ := newApp()
	lines := func() []string {
		var out strings.Builder
		if err := a.table(&out, "", rows); err != nil {
			t.Fatal(err)
		}
		return strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	}
	free := lines()
	if want := "aa:bb:cc:dd:ee:01  厨房的灯                                     online                websocket  bread-compact-wifi-lcd  2.2.6      12           now"; free[1] != want {
		t.Errorf("in a pipe:\n%s, want\n%s", free[1], want)
	}
	at := func(line, word string) int { return cellWidth(line[:strings.Index(line, word)]) }
	if at(free[1], "online") != at(free[2], "offline") || at(free[3], "online") != at(free[2], "offline") {
		t.Errorf("columns do not begin in the same place:\n%s", strings.Join(free, "\n"))
	}
	a.columns = 80
	for i, line := range lines() {
		if width := cellWidth(line); width > 80 {
			t.Errorf("%d characters: %s", width, line)
		}
		if id := rows[i][0]; !strings.HasPrefix(line, id+" ") || strings.ContainsRune(line, '\x1b') {
			t.Errorf("the id is cut, or a terminal sequence is in %q", line)
		}
	}
	if cut := lines()[2]; !strings.Contains(cut, "…") || !strings.Contains(cut, "offlin…") {
		t.Errorf("cut to %s", cut)
	}
	a.columns = 5 // nothing fits: what names the rows stays, and nothing fails
	if line := lines()[1]; !strings.HasPrefix(line, "aa:bb:cc:dd:ee:01") {
		t.Errorf("on a tiny terminal: %s", line)
	}
}
