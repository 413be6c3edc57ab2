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

// command is a request for a device.
func (s service) command(id, verb string, body []byte) *nats.Msg {
	return &nats.Msg{Subject: "fleetd.v1.cmd." + token(id) + "." + verb, Data: body, Header: nats.Header{"Fleetd-Token": {s.token}}}
}

func (s service) publish(t testing.TB, id, verb, body string) {
	t.Helper()
	if err := s.PublishMsg(s.command(id, verb, []byte(body))); err != nil {
		t.Error(err)
	}
}

// audience is what a service received from one device.
type audience struct {
	mu      sync.Mutex
	numbers []uint32 // of genuine frames, in order
	noise   int
	seqs    map[string][]uint64 // Fleetd-Seq by Fleetd-Session
}

// hear listens to a device's audio until the test ends.
func (s service) listen(t testing.TB, id string) *audience {
	t.Helper()
	a := &audience{seqs: map[string][]uint64{}}
	sub, err := s.Subscribe("fleetd.v1.devices."+token(id)+".audio", func(m *nats.Msg) {
		seq, err := strconv.ParseUint(m.Header.Get("Fleetd-Seq"), 10, 64)
		n, genuine := numberOf(m.Data)
		a.mu.Lock()
		defer a.mu.Unlock()
		if err != nil || !genuine {
			a.noise++
			return
		}
		session := m.Header.Get("Fleetd-Session")
		a.seqs[session] = append(a.seqs[session], seq)
		a.numbers = append(a.numbers, n)
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

// count is the number of different genuine frames received, and of those that
// came twice.
func (a *audience) count() (frames, twice, noise int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	seen := map[uint32]bool{}
	for _, n := range a.numbers {
		if seen[n] {
			twice++
		}
		seen[n] = true
	}
	return len(seen), twice, a.noise
}

// of returns the Fleetd-Seq headers of one conversation.
func (a *audience) of(session string) []uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]uint64(nil), a.seqs[session]...)
}
