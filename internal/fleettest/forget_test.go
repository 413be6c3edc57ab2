package fleettest

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// A device that is forgotten takes its photos and stored events along; those of
// others stay.
func TestForgetDeletesPhotosAndEvents(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, natsFlag, natsAnyPort)
	programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--devices", "2", "--seed", "9")
	node.AwaitReady(t, 2)
	list := node.List(t)
	for _, d := range list {
		for range 2 {
			askCamera(t, node, d.ID, "what is there?")
		}
	}
	js, err := jetstream.New(attach(t, node).Conn)
	if err != nil {
		t.Fatal(err)
	}
	stored := func(device string) (count uint64) {
		stream, err := js.Stream(t.Context(), "FLEETD_V1_EVENTS")
		if err != nil {
			t.Fatal(err)
		}
		info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter("fleetd.v1.devices."+token(device)+".>"))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range info.State.Subjects {
			count += n
		}
		return count
	}
	photos := func(device string) (count int) {
		for p, err := range apiclient.List[api.Photo](t.Context(), node.Client, apiclient.Query{"device": device}, "photos") {
			if err != nil {
				t.Fatal(err)
			}
			if _, err := node.Photo(t.Context(), p.ID, io.Discard); err != nil {
				t.Error(err)
			}
			count++
		}
		return count
	}
	first, second := list[0].ID, list[1].ID
	node.Await(t, "events are stored", 10*time.Second, func() bool { return stored(first) >= 4 && stored(second) >= 4 })
	if err := node.Forget(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	// security: N36
	if n := photos(first); n != 0 {
		t.Errorf("%d photos of the forgotten device", n)
	}
	if n := photos(second); n != 2 {
		t.Errorf("%d photos of the other one", n)
	}
	// It may be back, as a new member.
	node.Await(t, "the audit has that it was forgotten", 10*time.Second, func() (found bool) {
		for e, err := range apiclient.List[api.AuditEntry](t.Context(), node.Client, apiclient.Query{"device": first}, "audit") {
			if err != nil {
				t.Fatal(err)
			}
			found = found || e.Action == "forget"
		}
		return found
	})
	stream, err := js.Stream(t.Context(), "FLEETD_V1_EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	// security: N36
	if _, err := stream.GetLastMsgForSubject(t.Context(), "fleetd.v1.devices."+token(first)+".photo"); !errors.Is(err, jetstream.ErrMsgNotFound) {
		t.Errorf("an event of its photos is still there: %v", err)
	}
	if n := stored(second); n < 4 {
		t.Errorf("%d events of the other one", n)
	}
}

// A key with the scope broker judges logins and can do nothing else.
func TestBrokerKey(t *testing.T) {
	t.Parallel()
	broker := freePort(t) // nobody is there; logins are judged nevertheless
	node := programs.Start(t, "--mqtt", "tcp://"+broker)
	key, err := node.CreateKey(t.Context(), api.NewKey{Name: "emqx", Scopes: []string{"broker"}})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(method, path, body string) int {
		r, err := http.NewRequestWithContext(t.Context(), method, node.Info.API+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+key.Token)
		response, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close() // the status is enough
		return response.StatusCode
	}
	if got := ask("POST", "/v1/mqtt/authenticate", `{"clientid":"020000000001","username":"x","password":"y"}`); got != http.StatusOK {
		t.Errorf("a login is judged with %d", got)
	}
	for _, path := range []string{"/v1/devices", "/v1/photos", "/v1/events", "/v1/keys", "/v1/policy", "/v1/audit", "/v1/nodes", "/debug/pprof/"} {
		// security: N35
		if got := ask("GET", path, ""); got != http.StatusForbidden {
			t.Errorf("%s: %d", path, got)
		}
	}
}
