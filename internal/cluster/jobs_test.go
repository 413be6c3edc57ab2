package cluster

import (
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

func TestCreateJobOverNATS(t *testing.T) {
	f := newFleet(t)
	var served atomic.Int64
	for _, link := range []*Link{f.holder, f.far} {
		if err := link.OnJobs(Jobs{Look: func() {}, Create: func(_ context.Context, p access.Principal, body []byte, key string) ([]byte, error) {
			served.Add(1)
			if strings.Contains(string(body), "refuse") {
				return nil, devices.Errorf(devices.CodeQueueFull, "full")
			}
			return json.Marshal(map[string]string{"by": p.Name(), "via": string(p.Via), "key": key, "body": string(body)})
		}}); err != nil {
			t.Fatal(err)
		}
		if err := link.opt.Conn.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	scopes, _ := access.ParseScopes([]string{"jobs"})
	_, token, err := f.holding.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: "planner", Scopes: scopes})
	if err != nil {
		t.Fatal(err)
	}
	request := func(token, body string) (answer struct{ By, Via, Key, Body, Code string }) {
		t.Helper()
		msg, err := f.client.RequestMsg(&nats.Msg{Subject: "test.v1.cmd.jobs", Data: []byte(body), Header: nats.Header{HeaderToken: {token}, HeaderKey: {"once"}}}, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(msg.Data, &answer); err != nil {
			t.Fatalf("%s: %v", msg.Data, err)
		}
		return answer
	}
	devicetest.Eventually(t, "both nodes have the key", func() bool { return len(f.fwd.Keys().Keys()) == 1 && len(f.holding.Keys().Keys()) == 1 })
	if a := request(token, `{"a":1}`); a.By != "planner" || a.Via != "nats" || a.Key != "once" || a.Body != `{"a":1}` || served.Load() != 1 {
		t.Errorf("%+v, served %d times", a, served.Load())
	}
	if a := request(token, "refuse"); a.Code != string(devices.CodeQueueFull) {
		t.Errorf("%+v", a)
	}
	before := served.Load()
	if a := request("guess", `{}`); a.Code != string(devices.CodeUnauthorized) {
		t.Errorf("without a key: %+v", a)
	}
	if a := request(token, strings.Repeat("x", maxBody+1)); a.Code != string(devices.CodeTooLarge) {
		t.Errorf("64 KiB and one byte: %+v", a)
	}
	if served.Load() != before {
		t.Error("a refused request was served")
	}
	var refused []audit.Entry
	for _, e := range f.ports.Recorded() {
		if e.Kind == audit.KindRefusal {
			refused = append(refused, e)
		}
	}
	if len(refused) != 1 || refused[0].Action != "jobs" || refused[0].Via != "nats" {
		t.Errorf("%+v", refused)
	}
}

// A hint reaches every node but its sender; what no node has signed reaches none.
func TestHintWork(t *testing.T) {
	f := newFleet(t)
	var holder, far atomic.Int64
	for link, n := range map[*Link]*atomic.Int64{f.holder: &holder, f.far: &far} {
		if err := link.OnJobs(Jobs{Look: func() { n.Add(1) }}); err != nil {
			t.Fatal(err)
		}
		if err := link.opt.Conn.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	recorded, err := f.client.SubscribeSync("test.v1.work.*")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	f.far.HintWork()
	devicetest.Eventually(t, "the other node looks", func() bool { return holder.Load() == 1 })
	msg, err := recorded.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	refused := f.holder.Refused.Get(devices.CodeUnauthorized)
	for _, forged := range []*nats.Msg{{Subject: msg.Subject, Data: msg.Data}, {Subject: msg.Subject, Data: []byte(`{"a":1}`), Header: msg.Header}, {Subject: msg.Subject, Data: msg.Data, Header: msg.Header}} {
		if err := f.client.PublishMsg(forged); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "forged and repeated hints are refused", func() bool { return f.holder.Refused.Get(devices.CodeUnauthorized) == refused+3 })
	if holder.Load() != 1 || far.Load() != 0 {
		t.Errorf("the other node looked %d times, the sender %d times", holder.Load(), far.Load())
	}
}
