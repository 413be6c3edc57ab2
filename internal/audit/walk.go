package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"time"

	"fleetd/internal/jsonspan"
)

// Bounds of a walk.
const (
	WalkPage  = 8  // blocks of one look into the database
	MaxWalked = 64 // blocks of one walk; what is not found in them needs another
)

// Archive reads the stored blocks.
type Archive interface {
	// AuditBlocks returns blocks at or after q.Before, newest first.
	AuditBlocks(ctx context.Context, q Query) ([]Block, error)
}

// Filter selects entries. Empty fields select all.
type Filter struct {
	Since, Until                  time.Time
	Device, Kind, Action, Outcome string
	Key                           string // id or name of the caller's key
}

// match reports whether an entry is selected. Most are not, so the text is looked
// at before it is taken apart.
func (f *Filter) match(line []byte, e *Line) bool {
	for _, want := range [...]string{f.Device, f.Key, f.Kind, f.Action, f.Outcome} {
		if want != "" && !bytes.Contains(line, jsonspan.AppendString(nil, want)) {
			return false
		}
	}
	*e = Line{}
	return json.Unmarshal(line, e) == nil &&
		(f.Device == "" || e.Device == f.Device) && (f.Key == "" || e.Key == f.Key || e.Name == f.Key) &&
		(f.Kind == "" || string(e.Kind) == f.Kind) && (f.Action == "" || e.Action == f.Action) && (f.Outcome == "" || e.Outcome == f.Outcome) &&
		(f.Since.IsZero() || !e.At.Before(f.Since)) && (f.Until.IsZero() || !e.At.After(f.Until))
}

// Visit says how a walk goes on after an entry.
type Visit int

// Visits.
const (
	Next     Visit = iota
	Stop           // the next walk begins after this entry
	StopHere       // the next walk begins with this entry
)

// Walk calls visit for the entries that a filter selects, newest first, from a place on. visit must not keep the entry or its line of
// JSON. One walk reads a bounded number of blocks: more reports whether entries may follow, at the place next.
func Walk(ctx context.Context, archive Archive, f *Filter, place Place, visit func(e *Line, line []byte) Visit) (next Place, more bool, err error) {
	var e Line
	for walked := 0; walked < MaxWalked; walked += WalkPage {
		blocks, err := archive.AuditBlocks(ctx, Query{Since: f.Since, Until: f.Until, Before: place, Limit: WalkPage})
		if err != nil {
			return place, false, err
		}
		for i := range blocks {
			b := &blocks[i]
			limit := int64(0)
			if b.Run == place.Run && b.FirstSeq == place.FirstSeq {
				limit = place.Seq
			}
			place = Place{LastAt: b.LastAt, Run: b.Run, FirstSeq: b.FirstSeq}
			for rest := bytes.TrimSuffix(b.Entries, []byte("\n")); len(rest) > 0; {
				line := rest
				if cut := bytes.LastIndexByte(rest, '\n'); cut >= 0 {
					rest, line = rest[:cut], rest[cut+1:]
				} else {
					rest = nil
				}
				if !f.match(line, &e) || limit > 0 && e.Seq >= limit {
					continue
				}
				e.Run, e.Node = b.Run, b.Node
				switch visit(&e, line) {
				case Stop:
					place.Seq = e.Seq
					return place, true, nil
				case StopHere:
					place.Seq = e.Seq + 1
					return place, true, nil
				}
			}
			place.FirstSeq-- // after this block
		}
		if len(blocks) < WalkPage {
			return place, false, nil
		}
	}
	return place, true, nil
}
