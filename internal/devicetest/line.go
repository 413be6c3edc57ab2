package devicetest

import (
	"strings"
	"testing"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

// Line is a device's connection that answers from its script at once.
type Line struct {
	Script  *Script
	Session *session.Session
}

// SendControl hands the session what the script answers.
func (l *Line) SendControl(msg []byte) error {
	if _, ok := ParseRequest(msg); !ok {
		l.Script.note(string(msg))
	}
	if text := l.Script.Answer(msg); text != "" {
		_ = l.Session.HandleControl([]byte(text)) // the script is right or the test fails for want of an answer
	}
	return nil
}

// Close does nothing: the session has ended.
func (l *Line) Close(devices.CloseReason) {}

// Connect brings a device online that answers from a script, and waits until its
// tools are known.
func Connect(t testing.TB, s *fleet.Service, id devices.ID, script *Script) *Line {
	t.Helper()
	l := &Line{Script: script}
	Online(t, s, id, l, &l.Session)
	return l
}

// Online brings a device online over a connection that finds its session here,
// and waits until its tools are known.
func Online(t testing.TB, s *fleet.Service, id devices.ID, conn session.Conn, session **session.Session) {
	t.Helper()
	var err error
	if *session, err = s.Accept(devices.Identity{Device: id, ClientID: "client-1", Transport: devices.TransportWebSocket}, conn); err != nil {
		t.Fatal(err)
	}
	(*session).StartMCP(devices.FeaturesMCP)
	Eventually(t, "tools are listed", func() bool {
		v, err := s.Get(t.Context(), id)
		return err == nil && v.Presence.MCP == devices.MCPReady
	})
}

// Rights reads what a key is to have: scopes, separated by spaces, and a
// selector.
func Rights(t testing.TB, scopes, devices string) (access.Scopes, selector.Selector) {
	t.Helper()
	s, err := access.ParseScopes(strings.Fields(scopes))
	if err != nil {
		t.Fatal(err)
	}
	d, err := selector.Parse(devices)
	if err != nil {
		t.Fatal(err)
	}
	return s, d
}
