package restapi

import (
	"bytes"
	"context"
	"strconv"
	"sync"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// Limits of a stream in batches.
const (
	minBatch  = 100 * time.Millisecond
	maxBatch  = 5 * time.Second
	batchRows = 500 // events of one batch; of more, the newest
)

// kindChanges is the type of a batch.
const kindChanges = "changes"

// eventBatch collects events of a stream and writes them together. What follows from a later
// event of the same device is left out: of online and offline, and of catalog, the last one
// counts. It is safe for concurrent use; its memory is bounded, because add never waits for the reader.
type eventBatch struct {
	out *eventStream

	mu       sync.Mutex
	rows     []devices.StreamEvent // in order; those with an empty kind were replaced
	place    map[batchKey]int      // index in rows of what a later event replaces
	count    int                   // of rows that were not replaced
	replaced int
	omitted  int
	last     devices.EventPosition
}

type batchKey struct {
	device devices.ID
	kind   devices.EventKind
}

// keyOf returns what an event replaces, and is replaced by.
func keyOf(e *devices.StreamEvent) (key batchKey, replaces bool) {
	switch e.Kind {
	case devices.EventOnline, devices.EventOffline:
		return batchKey{e.Device, devices.EventOnline}, true
	case devices.EventCatalog:
		return batchKey{e.Device, e.Kind}, true
	}
	return batchKey{}, false
}

// add takes an event. A gap is written at once, after what came before it.
func (b *eventBatch) add(e devices.StreamEvent) error {
	if e.Gap {
		if err := b.flush(); err != nil {
			return err
		}
		return b.out.event(e)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	e.Data = bytes.Clone(e.Data)
	b.last = e.ID
	key, replaces := keyOf(&e)
	if at, ok := b.place[key]; ok && replaces {
		b.rows[at] = devices.StreamEvent{}
		b.count--
		b.replaced++
	}
	if b.count == batchRows {
		b.dropOldestLocked()
	}
	if len(b.rows) == 2*batchRows {
		b.compactLocked()
	}
	if replaces {
		if b.place == nil {
			b.place = map[batchKey]int{}
		}
		b.place[key] = len(b.rows)
	}
	b.rows = append(b.rows, e)
	b.count++
	return nil
}

func (b *eventBatch) dropOldestLocked() {
	for i := range b.rows {
		if b.rows[i].Kind != "" {
			if key, replaces := keyOf(&b.rows[i]); replaces {
				delete(b.place, key)
			}
			b.rows[i] = devices.StreamEvent{}
			b.count--
			b.omitted++
			return
		}
	}
}

// compactLocked removes the rows that were replaced or omitted.
func (b *eventBatch) compactLocked() {
	kept := b.rows[:0]
	for _, e := range b.rows {
		if e.Kind == "" {
			continue
		}
		if key, replaces := keyOf(&e); replaces {
			b.place[key] = len(kept)
		}
		kept = append(kept, e)
	}
	clear(b.rows[len(kept):])
	b.rows = kept
}

// flush writes what was collected, if there is anything.
func (b *eventBatch) flush() error {
	b.mu.Lock()
	if b.count == 0 {
		b.mu.Unlock()
		return nil
	}
	rows, replaced, omitted, last := b.rows, b.replaced, b.omitted, b.last
	b.rows, b.place, b.count, b.replaced, b.omitted = nil, nil, 0, 0, 0
	b.mu.Unlock()
	data := append(make([]byte, 0, 256*len(rows)), `{"events":[`...)
	first := true
	for i := range rows {
		e := &rows[i]
		if e.Kind == "" {
			continue
		}
		if !first {
			data = append(data, ',')
		}
		first = false
		data = jsonspan.AppendString(append(data, `{"type":`...), string(e.Kind))
		data = append(append(append(data, `,"data":`...), e.Data...), '}')
	}
	data = strconv.AppendInt(append(data, `],"replaced":`...), int64(replaced), 10)
	data = strconv.AppendInt(append(data, `,"omitted":`...), int64(omitted), 10)
	return b.out.event(devices.StreamEvent{ID: last, Kind: kindChanges, Data: append(data, '}')})
}

// run writes a batch in every interval until ctx ends or the reader is gone.
func (b *eventBatch) run(ctx context.Context, interval time.Duration) {
	for range clock.Ticks(ctx, interval) {
		if b.flush() != nil {
			return
		}
	}
}
