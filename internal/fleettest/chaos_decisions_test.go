package fleettest

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/api"
)

// Deciders of the chaos: who edits devices, how often, and how many devices are
// revoked.
const (
	chaosDeciders = 4
	chaosEdited   = 12 // few, so that edits of one device meet
	chaosRevoked  = 6
	revokedBase   = "02:c2:00:00:00:"
)

// decision is one edit of a part of a device.
type decision struct {
	value      string
	begun, end time.Time
	// held: it was answered by a node which had its database: then it
	// must not be lost. Any other may hold, and at any time.
	held bool
}

// decisions keep account of what operators decided while things broke.
type decisions struct {
	s    *storm
	stop context.CancelFunc
	done sync.WaitGroup

	mu      sync.Mutex
	random  *rand.Rand
	count   int
	made    map[string][]decision // by device and part
	revoked map[string]bool
}

// decide starts operators who edit names, labels and transports of the same
// devices through random nodes, and now and then revoke another device.
func (s *storm) decide(seed uint64) *decisions {
	ctx, stop := context.WithCancel(context.Background())
	d := &decisions{s: s, stop: stop, random: rand.New(rand.NewPCG(seed, 3)), made: map[string][]decision{}, revoked: map[string]bool{}}
	for n := range chaosDeciders {
		d.done.Go(func() {
			for i := 1; ctx.Err() == nil; i++ {
				d.edit()
				if n == 0 && i%40 == 0 {
					d.revoke()
				}
				select {
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond):
				}
			}
		})
	}
	s.t.Cleanup(d.end)
	return d
}

func (d *decisions) end() {
	d.stop()
	d.done.Wait()
}

// pick returns a node, and whether it runs.
func (d *decisions) pick() (via int, runs bool) {
	d.mu.Lock()
	via = d.random.IntN(len(d.s.Nodes))
	d.mu.Unlock()
	d.s.load.mu.Lock()
	defer d.s.load.mu.Unlock()
	return via, d.s.load.runs(via, time.Now())
}

// parts of a device that are edited.
var parts = []string{"name", "room", "transport"}

func (d *decisions) edit() {
	via, runs := d.pick()
	if !runs {
		return
	}
	d.mu.Lock()
	d.count++
	id, part, value := d.s.ids[d.random.IntN(chaosEdited)], parts[d.random.IntN(len(parts))], fmt.Sprint("v", d.count)
	if part == "transport" {
		value = []string{"mqtt", "websocket"}[d.count%2]
	}
	d.mu.Unlock()
	var patch api.DeviceEdit
	switch part {
	case "name":
		patch.Name = &value
	case "room":
		patch.Labels = map[string]*string{"room": &value}
	default:
		patch.TransportWanted = &value
	}
	made := decision{value: value, begun: time.Now()}
	sound := d.s.SQL[via].Sound(0)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := d.s.Nodes[via].Patch(ctx, id, patch, 0)
	made.held, made.end = err == nil && sound && d.s.SQL[via].Sound(0), time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.made[id+" "+part] = append(d.made[id+" "+part], made)
}

// allowed are the values that a part may have: those after which no other that
// must hold was begun. Transports come again, so all values count by what they
// say.
func allowed(made []decision) map[string]bool {
	out := map[string]bool{}
	for _, m := range made {
		if !m.held || !slices.ContainsFunc(made, func(later decision) bool { return later.held && later.begun.After(m.end) }) {
			out[m.value] = true
		}
	}
	if !slices.ContainsFunc(made, func(m decision) bool { return m.held }) {
		out[""] = true // perhaps nothing was decided
	}
	return out
}

func (d *decisions) revoke() {
	via, runs := d.pick()
	d.mu.Lock()
	id := fmt.Sprintf(revokedBase+"%02x", len(d.revoked))
	over := len(d.revoked) >= chaosRevoked
	d.mu.Unlock()
	if over || !runs {
		return
	}
	sound := d.s.SQL[via].Sound(0)
	_, _, status := d.s.Nodes[via].Command(d.s.t, "devices", "revoke", id)
	if status == 0 && sound && d.s.SQL[via].Sound(0) {
		d.mu.Lock()
		d.revoked[id] = true
		d.mu.Unlock()
	}
}

// revokeTheRest revokes what no storm reached, through a whole fleet.
func (d *decisions) revokeTheRest() {
	for n := len(d.revoked); n < chaosRevoked; n++ {
		id := fmt.Sprintf(revokedBase+"%02x", n)
		d.s.Nodes[0].Await(d.s.t, "device "+id+" is revoked", 30*time.Second, func() bool {
			_, _, status := d.s.Nodes[0].Command(d.s.t, "devices", "revoke", id)
			return status == 0
		})
		d.revoked[id] = true
	}
}

// decided: what was answered holds on every node and in the database, and
// nothing old has come back.
func (s *storm) decided() {
	d := s.decisions
	s.eventually("every node has what was decided", func() string {
		for at, n := range s.Nodes {
			for _, id := range s.ids[:chaosEdited] {
				v, err := n.Device(s.t.Context(), id)
				if err != nil {
					return fmt.Sprintf("node-%d: %s: %v", at, id, err)
				}
				var transport string
				if err := s.DB.Raw.QueryRow("SELECT preferred_transport FROM devices WHERE device = $1", id).Scan(&transport); err != nil {
					return err.Error()
				}
				for part, got := range map[string]string{"name": v.Name, "room": v.Labels["room"], "transport": transport} {
					if made := d.made[id+" "+part]; len(made) > 0 && !allowed(made)[got] {
						return fmt.Sprintf("node-%d: the %s of %s is %q; of %d decisions these may hold: %v", at, part, id, got, len(made), slices.Sorted(maps.Keys(allowed(made))))
					}
				}
				if other, err := s.Nodes[0].Device(s.t.Context(), id); err != nil || other.Name != v.Name || !maps.Equal(other.Labels, v.Labels) {
					return fmt.Sprintf("node-0 and node-%d differ on %s: %q %v, %q %v, %v", at, id, other.Name, other.Labels, v.Name, v.Labels, err)
				}
			}
			for id := range d.revoked {
				if v, err := n.Device(s.t.Context(), id); err != nil || v.State == "online" {
					return fmt.Sprintf("node-%d: the revoked device %s is %s, %v", at, id, v.State, err)
				}
			}
		}
		return ""
	})
	held := 0
	for _, made := range d.made {
		for _, m := range made {
			if m.held {
				held++
			}
		}
	}
	if held == 0 {
		s.violated("no edit was answered")
	}
	s.t.Logf("%d edits, %d of them must hold; %d devices revoked", d.count, held, len(d.revoked))
}

// kept: the streams that a storm removed are there again, and keep what happens.
func (s *storm) kept() {
	s.eventually("every device's end is in the stream", func() string {
		stream, err := s.streams().Stream(s.t.Context(), "FLEETD_V1_EVENTS")
		if err != nil {
			return err.Error()
		}
		info, err := stream.Info(s.t.Context(), jetstream.WithSubjectFilter("fleetd.v1.devices.*.offline"))
		if err != nil {
			return err.Error()
		}
		for _, id := range s.ids {
			if info.State.Subjects["fleetd.v1.devices."+strings.ReplaceAll(id, ":", "")+".offline"] == 0 {
				return fmt.Sprintf("%s is not there; %d devices are", id, len(info.State.Subjects))
			}
		}
		return ""
	})
}

// streams is JetStream of the fleet's server, on a connection that no fault
// reaches.
func (s *storm) streams() jetstream.JetStream {
	if s.js == nil {
		nc, err := nats.Connect(s.bus.ClientURL())
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(nc.Close)
		if s.js, err = jetstream.New(nc); err != nil {
			s.t.Fatal(err)
		}
	}
	return s.js
}

// loseStreams removes the streams of events.
func (s *storm) loseStreams() {
	s.done["streams lost"]++
	for _, name := range []string{"FLEETD_V1_EVENTS", "FLEETD_V1_NOTIFICATIONS"} {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		_ = s.streams().DeleteStream(ctx, name) // it may be lost already
		cancel()
	}
}

// staleStart kills a node, and starts it without its database, from its notes.
func (s *storm) staleStart(node int, lasts time.Duration) {
	s.done["started from notes"]++
	up := s.load.Down(node)
	s.Nodes[node].Kill(s.t)
	time.Sleep(lasts / 4) // others decide something meanwhile
	s.NATS[node].Break(0, None)
	s.SQL[node].Break(0, Cut)
	s.Nodes[node].Run(s.t)
	repair := time.AfterFunc(lasts/2, func() { s.SQL[node].Break(0, None) })
	s.t.Cleanup(func() { repair.Stop() })
	up()
}
