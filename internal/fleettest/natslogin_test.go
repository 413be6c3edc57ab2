package fleettest

import (
	"encoding/json"
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/apiclient"
)

// A service logs in to the embedded NATS with an API key, gets what its scopes open and
// no more, and is let go when the key ends.
func TestNATSLoginByKey(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, natsFlag, "0.0.0.0:0")
	programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--profile", "fw-2.4", "--devices", "1")
	node.AwaitReady(t, 1)
	at, err := url.Parse(node.Info.NATS)
	if err != nil {
		t.Fatal(err)
	}
	connect := func(token, inbox string, options ...nats.Option) (*nats.Conn, error) {
		nc, err := nats.Connect("nats://127.0.0.1:"+at.Port(), append(options, nats.Token(token), nats.CustomInboxPrefix(inbox), nats.MaxReconnects(0))...)
		if err == nil {
			t.Cleanup(nc.Close)
		}
		return nc, err
	}
	create := func(params apiclient.NewKeyParams) apiclient.Key {
		k, err := node.CreateKey(t.Context(), params)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	limited := create(apiclient.NewKeyParams{Name: "limited", Scopes: []string{"events:read"}, Devices: "room=lab"})
	// security: N9
	for name, token := range map[string]string{"nobody": "", "a wrong token": "x", "a key for some devices": limited.Token} {
		if _, err := connect(token, "_INBOX"); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := connect(node.Token(t), "_INBOX"); err != nil {
		t.Errorf("the admin token: %v", err)
	}
	key := create(apiclient.NewKeyParams{Name: "agent", Scopes: []string{"events:read", "tools:call"}})
	refused := make(chan error, 10)
	closed := make(chan struct{})
	nc, err := connect(key.Token, "_INBOX."+key.ID, nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err }), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		t.Fatal(err)
	}
	device := token(node.List(t)[0].ID)
	reply, err := nc.RequestMsg(&nats.Msg{Subject: "fleetd.v1.cmd." + device + ".call", Header: nats.Header{"Fleetd-Token": {key.Token}},
		Data: []byte(`{"tool":"` + volume + `","arguments":{"volume":7}}`)}, 20*time.Second)
	if err != nil || !json.Valid(reply.Data) {
		t.Fatalf("a call: %v", err)
	}
	if _, err := nc.SubscribeSync("fleetd.v1.devices.*.online"); err != nil {
		t.Fatal(err)
	}
	for _, subject := range []string{"fleetd.v1.cmd.>", "$JS.>", "_INBOX.>", "fleetd.v1.devices." + device + ".audio"} {
		if _, err := nc.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-refused: // security: N9
			if !errors.Is(err, nats.ErrPermissionViolation) {
				t.Errorf("%s: %v", subject, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s can be heard", subject)
		}
	}
	if _, err := node.RevokeKey(t.Context(), key.ID); err != nil {
		t.Fatal(err)
	}
	select {
	case <-closed: // security: N9
	case <-time.After(30 * time.Second):
		t.Error("the connection outlives its key")
	}
}
