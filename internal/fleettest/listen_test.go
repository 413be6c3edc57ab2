package fleettest

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// service is a program beside fleetd, attached to its embedded NATS.
type service struct {
	*nats.Conn
	token string
}

// attach connects to the NATS of a node that was started with --nats-listen.
func attach(t testing.TB, node *Node) service {
	t.Helper()
	nc, err := nats.Connect(node.Info.NATS, nats.MaxReconnects(-1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	token, err := os.ReadFile(node.Dir + "/admin-token")
	if err != nil {
		t.Fatal(err)
	}
	return service{nc, strings.TrimSpace(string(token))}
}

const natsFlag, natsAnyPort = "--nats-listen", "127.0.0.1:0"

func token(id string) string { return strings.ReplaceAll(id, ":", "") }

// audience is what a service received from one device.
type audience struct {
	mu   sync.Mutex
	seqs map[string][]uint64 // Fleetd-Seq by Fleetd-Session
}

// listen collects the device's audio until the test ends.
func (s service) listen(t testing.TB, id string) *audience {
	t.Helper()
	a := &audience{seqs: map[string][]uint64{}}
	sub, err := s.Subscribe("fleetd.v1.devices."+token(id)+".audio", func(m *nats.Msg) {
		seq, err := strconv.ParseUint(m.Header.Get("Fleetd-Seq"), 10, 64)
		if _, genuine := numberOf(m.Data); err != nil || !genuine {
			t.Errorf("audio of %s: %q, %v", id, m.Data, err)
			return
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		session := m.Header.Get("Fleetd-Session")
		a.seqs[session] = append(a.seqs[session], seq)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		t.Fatal(err)
	}
	if err := s.FlushTimeout(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	return a
}

// of returns the Fleetd-Seq headers of one conversation.
func (a *audience) of(session string) []uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]uint64(nil), a.seqs[session]...)
}
