package cluster

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// A node of another fleet receives one sentence about what differs.
func TestJoin(t *testing.T) {
	f := newFleet(t)
	if err := f.holder.Join(t.Context(), Fleet{Node: "holder", Database: "d", Secret: "s"}); err != nil {
		t.Fatalf("the first node: %v", err)
	}
	for _, c := range []struct {
		name   string
		fleet  Fleet
		refuse string
	}{
		{"another secret", Fleet{Node: "far", Database: "d", Secret: "x"}, "node holder has another secret; give this node that fleet's --secret"},
		{"another database", Fleet{Node: "far", Database: "x", Secret: "s"}, "node holder has another database; give this node that fleet's --database"},
		{"its database is unreachable", Fleet{Node: "far", Secret: "s"}, ""},
		{"the same fleet", Fleet{Node: "far", Database: "d", Secret: "s"}, ""},
	} {
		err := f.far.Join(t.Context(), c.fleet)
		// security: N3
		if c.refuse == "" && err != nil || c.refuse != "" && (!errors.Is(err, ErrOtherFleet) || !strings.Contains(err.Error(), c.refuse)) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// A node that joins again does not answer itself, although it has another secret
// this time: its connection does not echo.
func TestJoinAgain(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	if err := f.holder.Join(t.Context(), Fleet{Node: "holder", Secret: "s"}); err != nil {
		t.Fatal(err)
	}
	if err := f.holder.Join(t.Context(), Fleet{Node: "holder", Database: "d", Secret: "other"}); err != nil {
		t.Error(err)
	}
}

// That nodes do not answer in time does not mean that none run.
func TestJoinWithoutAnswer(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	silent, err := f.client.Subscribe(f.holder.fleetSubject(), func(*nats.Msg) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	own := Fleet{Node: "far", Database: "d", Secret: "s"}
	// security: N3
	if err := f.far.Join(t.Context(), own); !errors.Is(err, ErrNoAnswer) {
		t.Errorf("beside a node that does not answer: %v, want %v", err, ErrNoAnswer)
	}
	if err := silent.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	// It answers others meanwhile, one of another fleet as well.
	// security: N3
	if err := f.holder.Join(t.Context(), Fleet{Node: "holder", Database: "d", Secret: "x"}); !errors.Is(err, ErrOtherFleet) {
		t.Errorf("a node of another fleet that comes meanwhile: %v", err)
	}
}

func TestWireFleet(t *testing.T) {
	f := newFleet(t)
	if err := f.holder.Join(t.Context(), Fleet{Node: "holder", Database: "d", Secret: "s"}); err != nil {
		t.Fatal(err)
	}
	question := readWire(t, "fleet-question")
	answer, err := f.client.RequestMsg(question.nats(), 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	has(t, "fleet-answer", answer.Data, []byte(readWire(t, "fleet-answer").Body), "")
}
