package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// Devices that a dead node left online are marked offline once; a device that is
// connected here meanwhile is not.
func TestMarkNodeLost(t *testing.T) {
	ports := devicetest.New()
	s := ports.Service(t, fleet.Config{IsNodeAlive: func(string) bool { return true }})
	ports.Put(devices.Member{ID: "02:00:00:00:00:09"})
	p := overMQTT(t, s)
	rows := []devices.Presence{{Device: id, Epoch: 5, Seq: 1, Online: true, Node: "dead"}, {Device: "02:00:00:00:00:09", Epoch: 7, Seq: 3, Online: true, Node: "dead", Session: "s"}}
	lost, err := s.MarkNodeLost(t.Context(), "dead", func(_ context.Context, node string, _ devices.ID, _ int) ([]devices.Presence, error) {
		if node != "dead" {
			t.Errorf("queried node %s", node)
		}
		return rows, nil
	})
	if err != nil || lost != 1 { // the other one is connected here
		t.Errorf("%d, %v", lost, err)
	}
	events := ports.Seen(devices.EventOffline)
	if len(events) != 1 || events[0].Device != "02:00:00:00:00:09" || events[0].MsgID != "020000000009-7-offline" || string(events[0].Fields) != `"reason":"node_lost"` {
		t.Errorf("events %+v", events)
	}
	if _, n, _, _ := ports.Of(id); !n.Online || n.Session != p.session.ID() {
		t.Errorf("the device that is connected here is %+v", n)
	}
	if _, n, _, _ := ports.Of("02:00:00:00:00:09"); n.Online || n.Seq != 4 || n.Reason != "node_lost" {
		t.Errorf("the lost one is %+v", n)
	}
}

// Every connection is claimed; claims of other nodes end the session or not.
func TestClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := devicetest.New()
		s := ports.Service(t, fleet.Config{Node: "b"})
		p := overMQTT(t, s)
		own := p.session.Epoch()
		claims := func() []devices.Claim { return ports.Claimed() }
		if c := claims(); len(c) != 1 || c[0] != (devices.Claim{Device: id, Kind: devices.ClaimConnect, Node: "b", Epoch: own}) {
			t.Fatalf("claims %+v", c)
		}
		s.OnClaim(devices.Claim{Device: id, Kind: devices.ClaimConnect, Node: "a", Epoch: own - 1})
		s.OnClaim(devices.Claim{Device: id, Kind: devices.ClaimConnect, Node: "a", Epoch: own})
		s.OnClaim(devices.Claim{Device: id, Kind: devices.ClaimReassert, Node: "a", Epoch: own - 1})
		synctest.Wait()
		if p.reason() != "" || len(claims()) != 4 {
			t.Fatalf("closed as %q after %+v", p.reason(), claims())
		}
		time.Sleep(time.Minute)
		s.OnClaim(devices.Claim{Device: id, Kind: devices.ClaimConnect, Node: "a", Epoch: own - devices.Epoch(time.Hour/time.Microsecond)})
		synctest.Wait()
		if p.reason() != devices.CloseSuperseded {
			t.Fatal("a connection to another node with a slower clock did not end this one")
		}
		if last := claims()[len(claims())-1]; last.Kind != devices.ClaimAnswer || last.Epoch != own {
			t.Errorf("the answer is %+v", last)
		}
		again := overMQTT(t, s)
		if again.session.Epoch() <= own {
			t.Error("the next session has a lower epoch than the previous one")
		}
		s.OnClaim(devices.Claim{Device: id, Kind: devices.ClaimReassert, Node: "a", Epoch: again.session.Epoch() + 1})
		synctest.Wait()
		if again.reason() != devices.CloseSuperseded {
			t.Error("a higher epoch did not end this session")
		}
	})
}

// A session whose row the database refuses raises its epoch above rows that are offline
// or of a dead node. Above the row of another live node it does not: that node answers
// its claim.
func TestStaleWrite(t *testing.T) {
	const far = devices.Epoch(1 << 60)
	for _, c := range []struct {
		name    string
		stored  devices.Presence
		rises   bool
		appears bool // announced again
	}{
		{"a session that has ended", devices.Presence{Epoch: far, Seq: 3, Node: "other"}, true, true},
		{"left online by a dead node", devices.Presence{Epoch: far, Seq: 3, Node: "dead", Online: true}, true, false},
		{"left online by this node's last run", devices.Presence{Epoch: far, Seq: 3, Node: "n-test", Online: true}, true, false},
		{"held by another live node", devices.Presence{Epoch: far, Seq: 3, Node: "other", Online: true}, false, false},
		{"already lower", devices.Presence{Epoch: 1, Seq: 3, Node: "other"}, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ports := devicetest.New()
				s := ports.Service(t, fleet.Config{IsNodeAlive: func(node string) bool { return node == "other" }})
				p := overMQTT(t, s)
				before, claims, onlines := p.session.Epoch(), len(ports.Claimed()), len(ports.Seen(devices.EventOnline))
				c.stored.Device = id
				s.OnStaleWrite(c.stored)
				synctest.Wait()
				_, row, _, _ := ports.Of(id)
				if rose := p.session.Epoch() > before; rose != c.rises || c.rises && (p.session.Epoch() <= c.stored.Epoch || row.Epoch != p.session.Epoch() || !row.Online) {
					t.Errorf("epoch %d, before %d, row %+v", p.session.Epoch(), before, row)
				}
				if appeared := len(ports.Seen(devices.EventOnline)) > onlines; appeared != c.appears {
					t.Errorf("published again: %t", appeared)
				}
				if c.name == "held by another live node" {
					if len(ports.Claimed()) == claims {
						t.Error("no claim was sent to the other node")
					}
					time.Sleep(6 * time.Second)
					if _, again, _, _ := ports.Of(id); again.Seq <= row.Seq {
						t.Error("the row was not written again")
					}
				}
			})
		})
	}
}

// A node that was declared lost announces the devices that it still holds.
func TestReannounce(t *testing.T) {
	ports := devicetest.New()
	s := ports.Service(t, fleet.Config{})
	p := overMQTT(t, s)
	before := p.session.Epoch()
	s.Reannounce()
	if _, row, _, _ := ports.Of(id); p.session.Epoch() <= before || row.Epoch != p.session.Epoch() || !row.Online {
		t.Errorf("epoch %d, before %d, row %+v", p.session.Epoch(), before, row)
	}
	if n := len(ports.Seen(devices.EventOnline)); n != 2 {
		t.Errorf("%d online events", n)
	}
}

// stuckConn is a connection whose peer reads nothing: writes and Close block until the
// test ends.
type stuckConn struct{ free chan struct{} }

func (c stuckConn) SendControl([]byte) error {
	<-c.free
	return errors.New("closed")
}

func (c stuckConn) Close(devices.CloseReason) { <-c.free }

// Claims and news are processed in order; those of other devices do not wait for a
// stuck connection.
func TestStuckConnectionsDelayNoOthers(t *testing.T) {
	revoke := func(m *devices.Member) error {
		m.Admission = devices.AdmissionRevoked
		registry.RaiseGeneration(m, devices.Rotation{}, "revoked")
		return nil
	}
	forget := func(m *devices.Member) error {
		m.Admission = devices.AdmissionForgotten
		registry.RaiseGeneration(m, devices.Rotation{}, registry.ReasonForgotten)
		return nil
	}
	elsewhere := func(t *testing.T, p *devicetest.Ports, s *fleet.Service, id devices.ID, decide func(*devices.Member) error) {
		outcomes, err := p.Ledger.Decide(t.Context(), []devices.Decision{{ID: "of " + string(id), Device: id, Who: "elsewhere", Decide: decide}})
		if err != nil {
			t.Error(err)
		}
		s.Registry().Offer(outcomes[0].Changes)
	}
	for name, end := range map[string]func(t *testing.T, p *devicetest.Ports, s *fleet.Service, id devices.ID){
		"superseded": func(_ *testing.T, _ *devicetest.Ports, s *fleet.Service, id devices.ID) {
			s.OnClaim(devices.Claim{Device: id, Kind: devices.ClaimReassert, Node: "other", Epoch: 1 << 60})
		},
		"revoked": func(t *testing.T, p *devicetest.Ports, s *fleet.Service, id devices.ID) {
			elsewhere(t, p, s, id, revoke)
		},
		"forgotten": func(t *testing.T, p *devicetest.Ports, s *fleet.Service, id devices.ID) {
			elsewhere(t, p, s, id, forget)
		},
		"answered": func(_ *testing.T, _ *devicetest.Ports, s *fleet.Service, id devices.ID) {
			s.OnClaim(devices.Claim{Device: id, Kind: devices.ClaimAnswer, Node: "other", Epoch: 1 << 60, Conversation: "its conversation"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := devicetest.New()
			s := p.Service(t, fleet.Config{Node: "b"})
			free := make(chan struct{})
			t.Cleanup(func() { close(free) }) // before the service ends
			const count = 10
			of := func(n int) devices.ID { return devices.ID(fmt.Sprintf("02:00:00:00:00:%02x", n)) }
			for n := range count {
				if _, err := s.Accept(devices.Identity{Device: of(n), Transport: devices.TransportMQTT, Verified: true}, stuckConn{free}); err != nil {
					t.Fatal(err)
				}
			}
			taken := make(chan struct{})
			go func() {
				defer close(taken)
				for n := range count {
					end(t, p, s, of(n))
				}
			}()
			select {
			case <-taken:
			case <-time.After(5 * time.Second):
				// security: N6
				t.Error("they waited for the stuck connection")
			}
		})
	}
}
