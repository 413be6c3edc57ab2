package audit

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

var auditKey = []byte("the fleet's key for its record..")

// record makes a run of several blocks.
func record(t *testing.T, m *memory, key []byte, since time.Time) {
	t.Helper()
	l := New(Options{Node: "n-1", Version: "1", Store: m, Key: key, Since: since, Log: slog.New(slog.DiscardHandler)})
	for i := range 2 * maxGroup {
		l.Record(call(i))
	}
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// anew computes the hashes of blocks again, as somebody does who can write rows
// and has this key.
func anew(blocks []Block, key []byte) {
	for i := range blocks {
		b := &blocks[i]
		if i > 0 && blocks[i-1].Run == b.Run {
			b.Previous = blocks[i-1].Hash
		}
		b.Hash = b.Sum(key)
	}
}

// An attacker with access to the database but without the fleet's secret changes nothing
// unseen, neither within keyed runs nor by going back to runs without a key. What
// was written before the fleet had one verifies as before.
func TestForgedRecordShows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		record(t, m, nil, time.Time{}) // by an older version
		old := len(m.blocks)
		time.Sleep(time.Hour)
		since := time.Now()
		record(t, m, auditKey, since)
		time.Sleep(2 * KeyedGrace)
		record(t, m, auditKey, since)
		whole := m.blocks
		change := func(b *Block) { b.Entries = bytes.Replace(b.Entries, []byte("tool-77"), []byte("tool-78"), 1) }
		unkeyed := func(blocks []Block, name string) []Block { // the same entries in a run of another name
			out := slices.Clone(blocks)
			for i := range out {
				out[i].Run, out[i].Previous = name, Hash{}
			}
			change(&out[0])
			anew(out, nil)
			return out
		}
		last := slices.IndexFunc(whole, func(b Block) bool { return b.FirstAt.After(since.Add(time.Hour)) })
		for name, tc := range map[string]struct {
			forge func(b []Block) []Block
			since time.Time // as recorded on the node
			want  string    // empty: intact
		}{
			"nothing":                     {func(b []Block) []Block { return b }, time.Time{}, ""},
			"nothing, by the node":        {func(b []Block) []Block { return b }, since, ""},
			"only old ones":               {func(b []Block) []Block { return b[:old] }, since, ""},
			"hashed anew without a key":   {func(b []Block) []Block { change(&b[old]); anew(b[old:], nil); return b }, time.Time{}, "were modified"},
			"hashed anew with a guess":    {func(b []Block) []Block { change(&b[old]); anew(b[old:], []byte("guess")); return b }, time.Time{}, "were modified"},
			"hashed anew, plainly":        {func(b []Block) []Block { change(&b[old]); b[old].Hash = sha256.Sum256(b[old].Entries); return b }, time.Time{}, "were modified"},
			"back to no key":              {func(b []Block) []Block { return append(b[:last], unkeyed(whole[last:], "zzzzzzzzzzzzzzzz")...) }, time.Time{}, "without the fleet's key"},
			"back to no key, all of them": {func(b []Block) []Block { return append(b[:old], unkeyed(whole[last:], "zzzzzzzzzzzzzzzz")...) }, since, "without the fleet's key"},
			"a mark that lies":            {func(b []Block) []Block { return append(b[:old], unkeyed(whole[last:], "kzzzzzz-zzzzzzzz")...) }, since, "were modified"},
		} {
			v := Verifier{Key: auditKey, Since: tc.since}
			for _, b := range tc.forge(slices.Clone(whole)) {
				v.Add(&b)
			}
			r := v.Report()
			// security: R8
			if faults := fmt.Sprint(r.Faults); r.Intact != (tc.want == "") || !strings.Contains(faults, tc.want) {
				t.Errorf("%s: %s", name, faults)
			}
		}
		var v Verifier
		for i := range whole {
			v.Add(&whole[i])
		}
		if r := v.Report(); r.Intact || !v.NeedsKey() {
			t.Error("keyed blocks verify without the key")
		}
	})
}
