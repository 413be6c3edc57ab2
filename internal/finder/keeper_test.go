package finder

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"
)

// source is a fleet that counts what is read of it.
type source struct {
	mu    sync.Mutex
	docs  map[string]Doc
	reads int
	n     int // devices of a fleet that is too large
	err   error
}

func (s *source) Docs(_ context.Context, after string, limit int) (docs []Doc, next string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads++
	if s.n > 0 {
		from := 0
		if after != "" {
			if _, err := fmt.Sscan(after, &from); err != nil {
				return nil, "", err
			}
		}
		for i := range limit {
			docs = append(docs, Doc{ID: fmt.Sprintf("d%d", from+i)})
		}
		return docs, fmt.Sprint(from + limit), nil
	}
	for _, d := range s.docs {
		docs = append(docs, d)
	}
	return docs, "", s.err
}

func (s *source) Count(context.Context) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int64(max(s.n, len(s.docs))), nil
}

func (s *source) DocsOf(_ context.Context, ids []string) (docs []Doc, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		if d, ok := s.docs[id]; ok {
			docs = append(docs, d)
		}
	}
	return docs, s.err
}

func (s *source) ToolsOf(context.Context, string) ([]Tool, error) { return nil, nil }

func (s *source) set(id, name string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err = err; id != "" {
		s.docs[id] = Doc{ID: id, Name: name}
	}
}

// An index is read once, follows changes, also where reading them failed, and is
// read anew after a reset.
func TestKeeper(t *testing.T) {
	src := &source{docs: map[string]Doc{"a": {ID: "a", Name: "lamp"}}}
	k := NewKeeper(src, func(f func(context.Context)) bool { go f(t.Context()); return true })
	found := func(name string) int {
		t.Helper()
		x, err := k.Index(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return len(x.Named(name, all))
	}
	k.Changed("a") // nobody has asked yet
	if first, second := found("lamp"), found("lamp"); first != 1 || second != 1 || src.reads != 1 {
		t.Errorf("read %d times", src.reads)
	}
	src.set("b", "lamp", nil)
	if k.Changed("b"); found("lamp") != 2 {
		t.Error("a new device is not found")
	}
	src.set("a", "robot", errors.New("away"))
	k.Changed("a")
	if _, err := k.Index(t.Context()); err == nil {
		t.Error("changes that cannot be read are passed over")
	}
	src.set("", "", nil)
	if found("robot") != 1 || found("lamp") != 1 || src.reads != 1 {
		t.Errorf("after the database is back: read %d times", src.reads)
	}
	if k.Reset(); found("robot") != 1 || src.reads != 2 {
		t.Errorf("after a reset: read %d times", src.reads)
	}
	k.Expire(time.Now())
	if found("robot"); src.reads != 2 {
		t.Errorf("an index in use was dropped: read %d times", src.reads)
	}
	k.Expire(time.Now().Add(IdleTime + time.Second))
	if found("robot") != 1 || src.reads != 3 {
		t.Errorf("after a long rest: read %d times", src.reads)
	}
	for i := range maxChanged + 2 {
		k.Changed(fmt.Sprint(i))
	}
	if found("robot") != 1 || src.reads != 4 {
		t.Errorf("after many changes: read %d times", src.reads)
	}
}

// A fleet that is too large is read once a minute at most.
func TestTooMany(t *testing.T) {
	src := &source{n: 1}
	k := NewKeeper(src, func(f func(context.Context)) bool { go f(t.Context()); return true })
	for range 3 {
		if _, err := k.Index(t.Context()); !errors.Is(err, ErrTooMany) {
			t.Fatal(err)
		}
	}
	if most := MaxDevices/buildPage + 1; src.reads > most {
		t.Errorf("%d pages were read, %d are enough", src.reads, most)
	}
}
