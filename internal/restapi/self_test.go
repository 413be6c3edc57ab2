package restapi

import (
	"net/http"
	"reflect"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// Every caller with a token sees itself with its limits, and nobody else does.
func TestSelf(t *testing.T) {
	f := newFleet(t)
	scopes, labels := devicetest.Rights(t, "tools:call audio", "room=lab")
	expires := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	k, token, err := f.service.CreateKey(t.Context(), access.Principal{Caller: access.Admin, Via: access.ViaREST},
		fleet.NewKeyParams{Name: "lab", Scopes: scopes, Devices: labels, Tools: []string{"*get_*"}, Expires: expires})
	if err != nil {
		t.Fatal(err)
	}
	var got, want map[string]any
	f.do(t, "GET", "/v1/self", "", as(token)...).json(t, &got)
	want = map[string]any{"name": "lab", "key": k.ID, "scopes": []any{"tools:call", "audio"}, "devices": map[string]any{"room": "lab"},
		"tools": []any{"*get_*"}, "expires": expires.Format("2006-01-02T15:04:05.000Z"), "admin": false}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	got = nil
	f.do(t, "GET", "/v1/self", "").json(t, &got)
	if got["key"] != "admin" || got["admin"] != true || got["expires"] != nil || len(got["devices"].(map[string]any)) != 0 || len(got["tools"].([]any)) != 0 {
		t.Errorf("the admin token: %v", got)
	}
	for _, wrong := range []string{"", "Bearer fld_aaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"} {
		f.do(t, "GET", "/v1/self", "", "Authorization", wrong).problem(t, http.StatusUnauthorized, devices.CodeUnauthorized)
	}
	open := newFleet(t, func(o *Options) { o.AuthNone = true })
	got = nil
	open.do(t, "GET", "/v1/self", "", "Authorization", "").json(t, &got)
	if got["key"] != "open" || got["admin"] != true {
		t.Errorf("without tokens: %v", got)
	}
}
