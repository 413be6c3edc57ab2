package restapi

import (
	"errors"
	"strings"
	"testing"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
)

const messagesPath = "/v1/devices/aa:bb:cc:dd:ee:ff/messages"

// An alert reaches the device as it is, with the session id it expects.
func TestSendMessage(t *testing.T) {
	f := newFleet(t)
	l := f.connect(t, robot, devicetest.NewScript())
	l.mu.Lock()
	l.sent = make(chan string, 10)
	l.mu.Unlock()
	r := f.do(t, "POST", messagesPath, `{"type":"alert","status":"Door","message":"It \"rings\"","emotion":"happy","extra":[1, 2]}`)
	if r.status != 200 || r.body != "{\"ok\":true}\n" {
		t.Fatalf("%d %s", r.status, r.body)
	}
	if got := <-l.sent; !strings.HasPrefix(got, `{"session_id":"`) || !strings.HasSuffix(got, `,"type":"alert","status":"Door","message":"It \"rings\"","emotion":"happy","extra":[1, 2]}`) {
		t.Errorf("the device got %s", got)
	}
}

func TestSendMessageProblems(t *testing.T) {
	f := newFleet(t)
	l := f.connect(t, robot, devicetest.NewScript())
	for _, c := range []struct {
		path, body string
		status     int
		code       devices.Code
	}{
		{messagesPath, ``, 400, devices.CodeBadRequest},
		{messagesPath, `[]`, 400, devices.CodeBadRequest},
		{messagesPath, `{"type":1}`, 400, devices.CodeBadRequest},
		{messagesPath, `{"type":"mcp","payload":{}}`, 400, devices.CodeBadRequest},
		{messagesPath, `{"type":"hello"}`, 400, devices.CodeBadRequest},
		{messagesPath, `{"type":"tts","state":"start"}`, 400, devices.CodeBadRequest},
		{messagesPath, `{"type":"alert","status":"a"}`, 400, devices.CodeBadRequest},
		{messagesPath, `{"type":"custom","payload":"` + strings.Repeat("x", speech.MaxMessage) + `"}`, 413, devices.CodeTooLarge},
		{messagesPath, `{"type":"custom","payload":"` + strings.Repeat("x", BodyLimit) + `"}`, 413, devices.CodeTooLarge},
		{"/v1/devices/nobody/messages", `{"type":"system","command":"x"}`, 404, devices.CodeDeviceUnknown},
		{"/v1/devices/a.b/messages", `{"type":"system","command":"x"}`, 400, devices.CodeBadRequest},
	} {
		f.do(t, "POST", c.path, c.body).problem(t, c.status, c.code)
	}
	l.mu.Lock()
	l.broken = errors.New("broken pipe")
	l.mu.Unlock()
	f.do(t, "POST", messagesPath, `{"type":"system","command":"x"}`).problem(t, 502, devices.CodeConnectionLost)
	l.session.Close(devices.CloseGone)
	f.do(t, "POST", messagesPath, `{"type":"system","command":"x"}`).problem(t, 409, devices.CodeDeviceOffline)
}

// The broker's question is answered in its own words, and only by a node that
// has a broker.
func TestAuthenticateMQTT(t *testing.T) {
	f := newFleet(t, func(o *Options) {
		o.Authenticate = func(clientID, username, password string) error {
			if clientID+username+password == "dup" {
				return nil
			}
			return errors.New("no")
		}
	})
	for body, want := range map[string]string{
		`{"clientid":"d","username":"u","password":"p"}`: `"result":"allow"`,
		`{"clientid":"d"}`: `"result":"deny"`,
	} {
		if r := f.do(t, "POST", pathAuthenticate, body); r.status != 200 || !strings.Contains(r.body, want) {
			t.Errorf("%s: %d %s", body, r.status, r.body)
		}
	}
	if r := newFleet(t).do(t, "POST", pathAuthenticate, `{"clientid":"d"}`); r.status != 404 {
		t.Errorf("without a broker: %d", r.status)
	}
}
