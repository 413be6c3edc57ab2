package mqttdevice_test

import (
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/devicetest/client"
	"fleetd/internal/mqttdevice"
)

// stalling forwards connections to a broker. While it is stalled, it does not forward
// bytes of the client.
type stalling struct {
	net.Listener
	open chan struct{} // closed while it is not stalled
	mu   sync.Mutex
}

func stall(t *testing.T, broker string) *stalling {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &stalling{Listener: l, open: make(chan struct{})}
	close(s.open)
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", broker)
			if err != nil {
				_ = client.Close()
				continue
			}
			end := func() { _, _ = client.Close(), server.Close() }
			tasks.Go(func() { defer end(); _, _ = io.Copy(client, server) })
			tasks.Go(func() {
				defer end()
				for b := make([]byte, 4096); ; {
					<-s.gate()
					n, err := client.Read(b)
					if err != nil {
						return
					}
					if _, err := server.Write(b[:n]); err != nil {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		tasks.Wait()
	})
	return s
}

func (s *stalling) gate() chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

func (s *stalling) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = make(chan struct{})
}

// A broker that does not read for a while delays published messages, and no messages of
// devices, even if they need an answer.
func TestStalledPublish(t *testing.T) {
	t.Parallel()
	address := devicetest.Broker(t)
	way := stall(t, address)
	b := newBench(t)
	const other = devices.ID("02:00:00:00:00:02")
	b.become(t, id, "c1")
	b.become(t, other, "c2")
	source, err := mqttdevice.NewBroker(b.options, "tcp://"+way.Addr().String(), clientID(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.service.Close(); source.Close() })
	devicetest.Eventually(t, "the broker is connected", source.Up)
	dial := func(id devices.ID, clientID string) *client.Client {
		d, err := connect("tcp://"+address, b.login(id, clientID), id, true)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(d.Close)
		if err := d.Send(`{"type":"listen","state":"start"}`); err != nil {
			t.Fatal(err)
		}
		devicetest.Eventually(t, "it is online", func() bool {
			v, err := b.service.Get(t.Context(), id)
			return err == nil && v.State == devices.StateOnline
		})
		return d
	}
	busy, quiet := dial(id, "c1"), dial(other, "c2")
	way.stop()
	big := []byte(`{"type":"custom","payload":{"x":"` + strings.Repeat("x", 30_000) + `"}}`)
	stuck := make(chan struct{})
	t.Cleanup(func() { <-stuck })
	t.Cleanup(func() { close(way.gate()) })
	sent := make(chan struct{}, 1)
	go func() { // until no more is accepted
		defer close(stuck)
		for t.Context().Err() == nil && b.service.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: big}) == nil {
			select {
			case sent <- struct{}{}:
			default:
			}
		}
	}()
	for waiting := true; waiting; {
		select {
		case <-sent:
		case <-stuck:
			waiting = false
		case <-time.After(time.Second):
			waiting = false
		}
	}
	for range 3 {
		if err := busy.Send(`{"type":"mcp","payload":{"jsonrpc":"2.0","id":7,"method":"ping"}}`); err != nil {
			t.Fatal(err)
		}
	}
	begun := time.Now()
	if err := quiet.Send(`{"type":"listen","state":"stop"}`); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the other device's message arrives", func() bool {
		for _, e := range b.Seen(devices.EventMessage) {
			if e.Device == other && strings.Contains(string(e.Fields), "stop") {
				return true
			}
		}
		return false
	})
	if took := time.Since(begun); took > time.Second {
		t.Errorf("the other device's message arrived after %v", took)
	}
}
