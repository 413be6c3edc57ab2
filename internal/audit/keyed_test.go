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
)

var auditKey = []byte("the fleet's key for its record..")

// record makes a run of several blocks.
func record(t *testing.T, m *memory, key []byte) {
	t.Helper()
	l := New(Options{Node: "n-1", Version: "1", Store: m, Key: key, Log: slog.New(slog.DiscardHandler)})
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
// unseen, neither within a run nor by runs of its own.
func TestForgedRecordShows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		record(t, m, auditKey)
		first := len(m.blocks)
		record(t, m, auditKey)
		whole := m.blocks
		change := func(b *Block) { b.Entries = bytes.Replace(b.Entries, []byte("tool-77"), []byte("tool-78"), 1) }
		other := func(blocks []Block) []Block { // the same entries in a run of another name
			out := slices.Clone(blocks)
			for i := range out {
				out[i].Run, out[i].Previous = "zzzzzzzzzzzzzzzz", Hash{}
			}
			change(&out[0])
			anew(out, nil)
			return out
		}
		for name, tc := range map[string]struct {
			forge func(b []Block) []Block
			want  string // empty: intact
		}{
			"nothing":                   {func(b []Block) []Block { return b }, ""},
			"hashed anew without a key": {func(b []Block) []Block { change(&b[first]); anew(b[first:], nil); return b }, "not verifiable"},
			"hashed anew with a guess":  {func(b []Block) []Block { change(&b[first]); anew(b[first:], []byte("guess")); return b }, "not verifiable"},
			"hashed anew, plainly":      {func(b []Block) []Block { change(&b[first]); b[first].Hash = sha256.Sum256(b[first].Entries); return b }, "not verifiable"},
			"another run without a key": {func(b []Block) []Block { return append(b[:first], other(whole[first:])...) }, "not verifiable"},
			"no run with the key":       {func([]Block) []Block { return other(whole[first:]) }, "not verifiable"},
		} {
			v := Verifier{Key: auditKey}
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
			t.Error("blocks verify without the key")
		}
	})
}
