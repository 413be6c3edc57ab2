package finder

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Limits of a Keeper.
const (
	// MaxDevices is how many devices are indexed at most, which takes about 1 KB each.
	MaxDevices = 100_000
	// IdleTime is how long an index is kept after its last use.
	IdleTime = 10 * time.Minute
	// settleTime is after how long what a device reported is in the database.
	settleTime = 3 * time.Second
	buildPage  = 1000
	readRows   = 500
	// maxChanged is how many changes are worth reading; with more the index is built
	// anew.
	maxChanged = 5000
	buildTime  = time.Minute
	// buildAgain is how long a fleet that has too many devices is not counted again.
	buildAgain = time.Minute
)

// ErrTooMany is returned for a fleet with more than MaxDevices.
var ErrTooMany = errors.New("the fleet has too many devices to search them by words; use select")

// Source reads devices.
type Source interface {
	// Count returns how many devices there are.
	Count(ctx context.Context) (int64, error)
	// Docs returns a page of all devices, and where the next begins; empty: nowhere.
	Docs(ctx context.Context, after string, limit int) (docs []Doc, next string, err error)
	// DocsOf returns those of these devices that are there.
	DocsOf(ctx context.Context, ids []string) ([]Doc, error)
	// ToolsOf returns the tools of a list.
	ToolsOf(ctx context.Context, list string) ([]Tool, error)
}

// Keeper keeps an index while it is used: it builds the index at the first search, and
// applies changes at later ones. It is safe for concurrent use.
type Keeper struct {
	source Source
	run    func(func(context.Context)) bool // on a goroutine; false: the node stops

	reading chan struct{} // capacity 1: one at a time reads changes

	mu      sync.Mutex
	index   *Index
	build   *build // in progress, or failed
	used    time.Time
	changed map[string]struct{}  // in the database
	touched map[string]time.Time // on its way there, until then
}

// build makes an index.
type build struct {
	done  chan struct{}
	index *Index
	err   error
	at    time.Time
}

// NewKeeper returns a Keeper without an index.
func NewKeeper(source Source, run func(func(context.Context)) bool) *Keeper {
	return &Keeper{source: source, run: run, reading: make(chan struct{}, 1), changed: map[string]struct{}{}, touched: map[string]time.Time{}}
}

// Changed records that a stored device has changed. It does not block.
func (k *Keeper) Changed(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.followsLocked() {
		return
	}
	if k.changed[id] = struct{}{}; len(k.changed) > maxChanged && k.index != nil {
		k.dropLocked()
	}
}

// Touched records that a device has reported a change, which will be stored. It does not
// block.
func (k *Keeper) Touched(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.followsLocked() {
		return
	}
	if k.touched[id] = time.Now().Add(settleTime); len(k.touched) > maxChanged && k.index != nil {
		k.dropLocked()
	}
}

// Reset drops the index: anything may have changed.
func (k *Keeper) Reset() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dropLocked()
	k.build = nil // one in progress reads what was before
}

func (k *Keeper) dropLocked() {
	k.index = nil
	clear(k.changed)
	clear(k.touched)
}

// Expire drops an index that was not used for IdleTime.
func (k *Keeper) Expire(now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.index != nil && now.Sub(k.used) > IdleTime {
		k.dropLocked()
	}
}

// followsLocked reports whether changes matter: there is an index, or will be one.
func (k *Keeper) followsLocked() bool {
	return k.index != nil || k.build != nil && k.build.err == nil
}

// Index returns the index with all changes applied.
func (k *Keeper) Index(ctx context.Context) (*Index, error) {
	for {
		k.mu.Lock()
		k.used = time.Now()
		x, b := k.index, k.build
		switch {
		case x != nil:
			k.mu.Unlock()
			return x, k.catchUp(ctx, x)
		case b == nil || b.err != nil && (!errors.Is(b.err, ErrTooMany) || time.Since(b.at) > buildAgain):
			b = &build{done: make(chan struct{}), at: time.Now()}
			k.build = b
			if !k.run(func(ctx context.Context) { k.make(ctx, b) }) {
				k.build = nil
				k.mu.Unlock()
				return nil, context.Canceled
			}
		case b.err != nil:
			k.mu.Unlock()
			return nil, b.err
		}
		k.mu.Unlock()
		select {
		case <-b.done:
			if b.err != nil {
				return nil, b.err
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// make builds an index, and puts it in place unless it was dropped meanwhile.
func (k *Keeper) make(ctx context.Context, b *build) {
	ctx, cancel := context.WithTimeout(ctx, buildTime)
	defer cancel()
	x, err := k.readAll(ctx)
	k.mu.Lock()
	defer k.mu.Unlock()
	b.index, b.err = x, err
	if k.build == b {
		if k.index = x; err == nil {
			k.build = nil
		}
	}
	close(b.done)
}

func (k *Keeper) readAll(ctx context.Context) (*Index, error) {
	switch n, err := k.source.Count(ctx); { // before the first device is read
	case err != nil:
		return nil, fmt.Errorf("count the devices: %w", err)
	case n > MaxDevices:
		return nil, ErrTooMany
	}
	x := New()
	for after := ""; ; {
		docs, next, err := k.source.Docs(ctx, after, buildPage)
		if err != nil {
			return nil, fmt.Errorf("index the devices: %w", err)
		}
		if err := k.put(ctx, x, docs); err != nil {
			return nil, err
		}
		if x.Len() > MaxDevices {
			return nil, ErrTooMany
		}
		if after = next; next == "" {
			return x, nil
		}
	}
}

// put adds devices, and the tools that they have.
func (k *Keeper) put(ctx context.Context, x *Index, docs []Doc) error {
	for _, d := range docs {
		if d.List != "" && !x.HasList(d.List) {
			tools, err := k.source.ToolsOf(ctx, d.List)
			if err != nil {
				return fmt.Errorf("index the tools of devices: %w", err)
			}
			x.SetList(d.List, tools)
		}
		x.Put(d)
	}
	return nil
}

// catchUp reads what has changed.
func (k *Keeper) catchUp(ctx context.Context, x *Index) error {
	select {
	case k.reading <- struct{}{}:
		defer func() { <-k.reading }()
	case <-ctx.Done():
		return ctx.Err()
	}
	ids := k.due(time.Now())
	for len(ids) > 0 {
		part := ids[:min(len(ids), readRows)]
		docs, err := k.source.DocsOf(ctx, part)
		if err == nil {
			err = k.put(ctx, x, docs)
		}
		if err != nil {
			for _, id := range ids {
				k.Changed(id)
			}
			return fmt.Errorf("index what has changed: %w", err)
		}
		there := make(map[string]bool, len(docs))
		for _, d := range docs {
			there[d.ID] = true
		}
		for _, id := range part {
			if !there[id] {
				x.Remove(id)
			}
		}
		ids = ids[len(part):]
	}
	return nil
}

// due takes the devices that have to be read again.
func (k *Keeper) due(now time.Time) (ids []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, at := range k.touched {
		if !at.After(now) {
			delete(k.touched, id)
			k.changed[id] = struct{}{}
		}
	}
	for id := range k.changed {
		ids = append(ids, id)
	}
	clear(k.changed)
	return ids
}
