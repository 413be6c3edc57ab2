package firmware

import (
	"context"
	"errors"
	"fmt"
)

// Errors of ReadReply and of what else a server sends.
var (
	// ErrRetry marks an OTA reply that counts as a failed check: the device checks again.
	ErrRetry = errAnswer
	// ErrAbort marks text on which the chip aborts: it restarts, checks again, and aborts again.
	ErrAbort = errors.New("the device aborts and restarts, forever")
	// ErrHang marks an HTTP answer after which the device's HTTP client never returns.
	ErrHang = errHang
	// ErrCrash marks what makes a chip read foreign memory in the middle of its work.
	ErrCrash = errCrash
)

// Reply is what a device has after an OTA reply.
type Reply struct {
	Code, Challenge string // of the activation; empty: none
	Upgrade         bool   // to the image at UpgradeURL
	UpgradeURL      string
	// Login is for what the device connects to: MQTT wins if both are offered. Device and Client are not filled in.
	Login Login
}

// Flash is a device's settings, which outlive restarts. The zero value is that of a new device. Not safe for concurrent use.
type Flash struct{ settings nvs }

// ReadReply reads an OTA reply as a device of that version does, keeps its settings in the flash, and returns what the
// device does next (main/ota.cc:79-245, main/application.cc:340-355). Errors are ErrRetry, ErrAbort, ErrHang and ErrCrash;
// another one means that the address of the WebSocket cannot be dialled.
func (f *Flash) ReadReply(body []byte, version string) (Reply, error) {
	if len(body) >= maxHTTPBody {
		return Reply{}, ErrHang
	}
	a, err := readOTA(body, &f.settings, version)
	if errors.Is(err, errNVS) || errors.Is(err, errStoi) {
		err = fmt.Errorf("%w: %w", ErrAbort, err)
	}
	if err != nil {
		return Reply{}, err
	}
	r := Reply{Code: a.code, Challenge: a.challenge, Upgrade: a.upgrade, UpgradeURL: a.firmwareURL}
	broken := ErrAbort
	if a.websocket && !a.mqtt {
		broken = ErrCrash // it dials when it is woken, and not at its boot
		r.Login = Login{URL: f.settings.text("websocket", "url"), Token: f.settings.text("websocket", "token"), Version: max(1, f.settings.number("websocket", "version"))}
	} else {
		r.Login = f.settings.mqttLogin(true)
	}
	if _, err = r.Login.parse(); errors.Is(err, errStoi) {
		err = fmt.Errorf("%w: %w", broken, err)
	}
	return r, err
}

// mqttLogin reads what the next connection over MQTT is made with (main/protocols/mqtt_protocol.cc:77-83).
func (n *nvs) mqttLogin(subscribe bool) Login {
	text := func(key string) string { return n.text("mqtt", key) }
	l := Login{Endpoint: text("endpoint"), PublishTopic: text("publish_topic"), ClientID: text("client_id"), Username: text("username"), Password: text("password"), Keepalive: defaultKeepalive}
	if n.find("mqtt", "keepalive") != nil {
		l.Keepalive = uint16(max(0, min(n.number("mqtt", "keepalive"), 65535)))
	}
	if subscribe {
		l.SubscribeTopic = text("subscribe_topic")
	}
	return l
}

// CheckIn requests the OTA address once, as the first device does at its boot, and reads the reply with a new flash.
func (f *Fleet) CheckIn(ctx context.Context) (Reply, error) {
	d := f.devices[0]
	body, err := d.fetch(ctx)
	r := Reply{}
	if err == nil {
		r, err = new(Flash).ReadReply(body, d.profile.version)
	}
	r.Login.Device, r.Login.Client = d.id, d.clientID
	return r, err
}
