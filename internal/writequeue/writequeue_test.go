package writequeue

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"fleetd/internal/devices"
)

// wire is a connection whose writes wait for gate.
type wire struct {
	mu      sync.Mutex
	written []string
	gate    chan error // one value per write, if set
	tasks   sync.WaitGroup
}

func (w *wire) Write(kind int, msg []byte) error {
	if w.gate != nil {
		if err := <-w.gate; err != nil {
			return err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.written = append(w.written, string(rune('0'+kind))+string(msg))
	return nil
}

func (w *wire) Go(task func()) { w.tasks.Go(task) }

func (w *wire) all() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(bytes.Join(func() (b [][]byte) {
		for _, m := range w.written {
			b = append(b, []byte(m))
		}
		return b
	}(), []byte(" ")))
}

// Everything is written once and in order, whichever caller writes, and only the first
// caller waits.
func TestOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, b := &wire{gate: make(chan error)}, &Queue{}
		first := make(chan error, 1)
		go func() { first <- b.Send(w, 1, []byte("a"), 10) }()
		synctest.Wait()
		buf := []byte("b")
		if err := b.Send(w, 2, buf, 10); err != nil {
			t.Fatal(err)
		}
		buf[0] = 'x' // a queued message is a copy
		if err := b.Send(w, 1, []byte("c"), 10); err != nil {
			t.Fatal(err)
		}
		if err := b.Send(w, 1, []byte("too long!"), 10); !errors.Is(err, devices.ErrOverloaded) {
			t.Errorf("over the limit: %v", err)
		}
		w.gate <- nil
		if err := <-first; err != nil {
			t.Error(err)
		}
		if err := b.Send(w, 1, []byte("d"), 10); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			w.gate <- nil
		}
		w.tasks.Wait()
		if got := w.all(); got != "1a 2b 1c 1d" {
			t.Errorf("written %s", got)
		}
		// Written messages free their space: the whole limit is available again.
		go func() { first <- b.Send(w, 1, []byte("e"), 10) }()
		synctest.Wait()
		if err := b.Send(w, 1, []byte("ten bytes!"), 10); err != nil {
			t.Errorf("as much as the limit: %v", err)
		}
		if err := b.Send(w, 1, []byte("f"), 10); !errors.Is(err, devices.ErrOverloaded) {
			t.Errorf("one byte more: %v", err)
		}
		for range 2 {
			w.gate <- nil
		}
		if err := <-first; err != nil {
			t.Error(err)
		}
		w.tasks.Wait()
	})
}

// Messages that wait during Hold are written after the one that is sent first.
func TestHold(t *testing.T) {
	w, b := &wire{}, &Queue{}
	b.Hold()
	if err := b.Send(w, 1, []byte("b"), 10); err != nil || w.all() != "" {
		t.Fatal(err, w.all())
	}
	_ = w.Write(0, []byte("a"))
	b.Flush(w)
	if err := b.Send(w, 1, []byte("c"), 10); err != nil || w.all() != "0a 1b 1c" {
		t.Error(err, w.all())
	}
}

// A failed write may have sent half a message: nothing may follow it.
func TestBrokenWrite(t *testing.T) {
	for _, queued := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w, b := &wire{gate: make(chan error)}, &Queue{}
			broken := errors.New("broken")
			first := make(chan error, 1)
			go func() { first <- b.Send(w, 1, []byte("a"), 10) }()
			synctest.Wait()
			if queued {
				if err := b.Send(w, 1, []byte("b"), 10); err != nil {
					t.Fatal(err)
				}
				w.gate <- nil
				<-first
				w.gate <- broken
				w.tasks.Wait()
			} else {
				w.gate <- broken
				if err := <-first; !errors.Is(err, broken) {
					t.Errorf("got %v", err)
				}
			}
			if err := b.Send(w, 1, []byte("c"), 10); !errors.Is(err, ErrClosed) {
				t.Errorf("after a broken write: %v", err)
			}
			b.IfOpen(func() { t.Error("it counts as open") })
			if !b.Close() || b.Close() {
				t.Error("Close does not distinguish the first call from the second")
			}
		})
	}
}

// Enqueue never waits, even if no write is in progress; order and limit apply as for Send.
func TestEnqueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, b := &wire{gate: make(chan error)}, &Queue{}
		for _, msg := range []string{"a", "b"} {
			if err := b.Enqueue(w, 1, []byte(msg), 10); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.Send(w, 2, []byte("c"), 10); err != nil { // after the queued messages
			t.Fatal(err)
		}
		if err := b.Enqueue(w, 1, []byte("eleven bytes"), 10); !errors.Is(err, devices.ErrOverloaded) {
			t.Errorf("over the limit: %v", err)
		}
		for range 3 {
			w.gate <- nil
		}
		w.tasks.Wait()
		if got := w.all(); got != "1a 1b 2c" {
			t.Errorf("written %s", got)
		}
		b.Close()
		if err := b.Enqueue(w, 1, []byte("d"), 10); !errors.Is(err, ErrClosed) {
			t.Errorf("after the end: %v", err)
		}
	})
}
