package mqttdevice_test

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/devicetest/client"
	"fleetd/internal/fleet"
	"fleetd/internal/mqttdevice"
)

func (b *bench) raw(t testing.TB) client.Raw { return client.DialRaw(t, b.address) }

func encode(t testing.TB, p packets.ControlPacket) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := p.Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func (b *bench) connectPacket(t testing.TB, change func(*packets.ConnectPacket)) []byte {
	t.Helper()
	login := b.login(id, "c1")
	p := packets.NewControlPacket(packets.Connect).(*packets.ConnectPacket)
	p.ProtocolName, p.ProtocolVersion, p.CleanSession, p.Keepalive = "MQTT", 4, true, 60
	p.ClientIdentifier, p.UsernameFlag, p.Username, p.PasswordFlag, p.Password = login.ClientID, true, login.Username, true, []byte(login.Password)
	if change != nil {
		change(p)
	}
	return encode(t, p)
}

// up opens a connection and waits until it is admitted.
func (b *bench) up(t testing.TB) client.Raw {
	t.Helper()
	r := b.raw(t)
	r.Send(b.connectPacket(t, nil))
	if p, ok := r.Packet().(*packets.ConnackPacket); !ok || p.ReturnCode != packets.Accepted {
		t.Fatalf("CONNECT was answered by %v", p)
	}
	return r
}

func TestConnackCodes(t *testing.T) {
	b := open(t)
	b.become(t, "02:00:00:00:00:05", "c5")
	if _, err := b.service.Revoke(t.Context(), devicetest.Admin, "02:00:00:00:00:05"); err != nil {
		t.Fatal(err)
	}
	b.become(t, "02:00:00:00:00:06", "c6")
	set := func(client, user, password string) func(*packets.ConnectPacket) {
		return func(p *packets.ConnectPacket) {
			p.ClientIdentifier, p.Username, p.Password = client, user, []byte(password)
		}
	}
	const gatewayID = "GID_lichuang-dev@@@aa_bb_cc_dd_ee_ff@@@36c98363-3656-43cb-a00f-8bced2391a90"
	const gatewayUser = "eyJpcCI6IjIyMi4yMjIuMjIyLjIyMiJ9"
	good := b.login(id, "c1")
	for name, c := range map[string]struct {
		change func(*packets.ConnectPacket)
		code   byte
	}{
		"good":                       {nil, 0},
		"MQTT 3.1":                   {func(p *packets.ConnectPacket) { p.ProtocolName, p.ProtocolVersion = "MQIsdp", 3 }, 0},
		"MQTT 5":                     {func(p *packets.ConnectPacket) { p.ProtocolVersion = 5 }, 1},
		"another protocol":           {func(p *packets.ConnectPacket) { p.ProtocolName = "AMQP" }, 1},
		"empty client id":            {set("", good.Username, good.Password), 2},
		"hostile client id":          {set("../#", good.Username, good.Password), 2},
		"two-part client id":         {set("GID_x@@@aa_bb_cc_dd_ee_ff", gatewayUser, "x"), 2},
		"wrong password":             {set(good.ClientID, good.Username, "wrong"), 4},
		"no password":                {func(p *packets.ConnectPacket) { p.PasswordFlag, p.UsernameFlag = false, false }, 4},
		"password of another":        {set("020000000099", good.Username, good.Password), 4},
		"Client-Id of another":       {set(good.ClientID, "client:c2", good.Password), 4},
		"password of the generation": {set("020000000005", "client:c5", b.mint.DeviceToken("02:00:00:00:00:05", "c5", 0)), 4},
		"revoked":                    {set("020000000005", "client:c5", b.mint.DeviceToken("02:00:00:00:00:05", "c5", 1)), 5},
		"client not admitted":        {set("020000000006", "client:", b.mint.DeviceToken("02:00:00:00:00:06", "", 0)), 5},
		"gateway's login":            {set(gatewayID, gatewayUser, "4mZePrI2DkxNhNnHRl/WS8KKzrFqXMvj0c3a/OGeMas="), 0},
		"gateway's wrong password":   {set(gatewayID, gatewayUser, "4mZePrI2DkxNhNnHRl/WS8KKzrFqXMvj0c3a/OGeMat="), 4},
	} {
		t.Run(name, func(t *testing.T) {
			r := b.raw(t)
			r.Send(b.connectPacket(t, c.change))
			ack, ok := r.Packet().(*packets.ConnackPacket)
			if !ok || ack.ReturnCode != c.code || ack.SessionPresent {
				t.Fatalf("answered by %v, want code %d", ack, c.code)
			}
			if c.code != 0 {
				if more, _ := r.Ended(5 * time.Second); len(more) > 0 {
					t.Errorf("received after the refusal: %x", more)
				}
			}
		})
	}
	for _, reason := range []devices.CloseReason{devices.CloseProtocol, devices.CloseInternal, devices.CloseRevoked} {
		if n := b.service.Stats().Closed.Get(reason); n != 0 {
			t.Errorf("refusals count as %d disconnects, %s", n, reason)
		}
	}
}

// A gateway's login cannot be renewed, so the first revocation ends it permanently.
func TestGatewayLoginEnds(t *testing.T) {
	b := open(t)
	const login = "eyJpcCI6IjEuMi4zLjQifQ=="
	const client = "GID_x@@@02_00_00_00_00_07@@@u"
	dial := func() byte {
		r := b.raw(t)
		r.Send(b.connectPacket(t, func(p *packets.ConnectPacket) {
			p.ClientIdentifier, p.Username, p.Password = client, login, []byte(b.gateway.Password(client, login))
		}))
		return r.Packet().(*packets.ConnackPacket).ReturnCode
	}
	if code := dial(); code != 0 {
		t.Fatalf("code %d", code)
	}
	if _, err := b.service.Revoke(t.Context(), devicetest.Admin, "02:00:00:00:00:07"); err != nil {
		t.Fatal(err)
	}
	if code := dial(); code != packets.ErrRefusedNotAuthorised {
		t.Errorf("after the revocation: code %d", code)
	}
	// A device that is admitted again gets new credentials; the gateway's stay invalid.
	if _, err := b.service.Approve(t.Context(), devicetest.Admin, "02:00:00:00:00:07", ""); err != nil {
		t.Fatal(err)
	}
	if code := dial(); code != packets.ErrRefusedNotAuthorised {
		t.Errorf("approved again: code %d", code)
	}
	if err := b.service.Forget(t.Context(), devicetest.Admin, "02:00:00:00:00:07"); err != nil {
		t.Fatal(err)
	}
	if code := dial(); code != packets.ErrRefusedNotAuthorised {
		t.Errorf("removed, with open enrollment: code %d", code)
	}
}

// A gateway's login proves the id of the device only; membership in the fleet is decided
// as in an OTA check.
func TestGatewayLoginNeedsMembership(t *testing.T) {
	const user = "eyJpcCI6IjEuMi4zLjQifQ=="
	for _, approve := range []bool{false, true} {
		b := newBenchWith(t, fleet.Config{Approve: approve})
		b.listen(t)
		dial := func(client string) byte {
			r := b.raw(t)
			r.Send(b.connectPacket(t, func(p *packets.ConnectPacket) {
				p.ClientIdentifier, p.Username, p.Password = client, user, []byte(b.gateway.Password(client, user))
			}))
			return r.Packet().(*packets.ConnackPacket).ReturnCode
		}
		unknown := byte(0)
		if approve {
			unknown = packets.ErrRefusedNotAuthorised
		}
		const first, second = "G@@@02_00_00_00_00_08@@@one", "G@@@02_00_00_00_00_08@@@two"
		if code := dial(first); code != unknown {
			t.Errorf("approve %t: an unknown device got code %d", approve, code)
		}
		if approve {
			if _, err := b.service.Approve(t.Context(), devicetest.Admin, "02:00:00:00:00:08", ""); err != nil {
				t.Fatal(err)
			}
			if code := dial(first); code != 0 {
				t.Errorf("approved: code %d", code)
			}
		}
		if code := dial(second); code != packets.ErrRefusedNotAuthorised {
			t.Errorf("approve %t: another client of the device got code %d", approve, code)
		}
		if len(b.Seen(devices.EventPending)) == 0 {
			t.Errorf("approve %t: no pending event was sent", approve)
		}
		// The manager puts the MAC address where the Client-Id belongs.
		if code := dial("G@@@02_00_00_00_00_08@@@02_00_00_00_00_08"); code != 0 {
			t.Errorf("approve %t: its own address for a Client-Id got code %d", approve, code)
		}
		// The signed text joins id and user with a vertical bar.
		const forged = "G@@@02_00_00_00_00_08@@@u"
		r := b.raw(t)
		r.Send(b.connectPacket(t, func(p *packets.ConnectPacket) {
			p.ClientIdentifier, p.Username = forged, "foo@@@02_00_00_00_00_09@@@v|"+user
			p.Password = []byte(b.gateway.Password(forged+"|foo@@@02_00_00_00_00_09@@@v", user))
		}))
		if code := r.Packet().(*packets.ConnackPacket).ReturnCode; code != packets.ErrRefusedBadUsernameOrPassword {
			t.Errorf("another device's password got code %d", code)
		}
	}
}

// Each of these packets ends its connection, some after an answer, and affects no other
// device.
func TestBrokenPacketsEndTheirConnection(t *testing.T) {
	b := open(t)
	other := b.dial(t, "02:00:00:00:00:02", "other")
	t.Cleanup(other.Close)
	publish := func(topic, payload string, qos byte) []byte {
		p := packets.NewControlPacket(packets.Publish).(*packets.PublishPacket)
		p.TopicName, p.Payload, p.Qos, p.MessageID = topic, []byte(payload), qos, 7
		return encode(t, p)
	}
	for name, what := range map[string][]byte{
		"five-byte remaining length": {0x10, 0xff, 0xff, 0xff, 0xff, 0x01},
		"publish before CONNECT":     publish("fleetd/020000000001/up", "{}", 0),
		"ping before CONNECT":        {0xc0, 0},
		"reserved type":              {0xf0, 0},
		"packets of servers":         {0x20, 2, 0, 0},
		"CONNECT with flags":         {0x11, 0},
		"CONNECT over the limit":     {0x10, 0x80, 0x10},
		"empty CONNECT":              {0x10, 0},
		"CONNECT cut in its id":      {0x10, 14, 0, 4, 'M', 'Q', 'T', 'T', 4, 2, 0, 60, 0, 9, 'a', 'b'},
		"HTTP":                       []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"TLS":                        {0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3},
	} {
		t.Run("before/"+name, func(t *testing.T) {
			r := b.raw(t)
			r.Send(what)
			// security: D11
			if got, _ := r.Ended(7 * time.Second); len(got) > 0 {
				t.Errorf("answered with %x", got)
			}
		})
	}
	for name, what := range map[string][]byte{
		"five-byte remaining length": {0x30, 0xff, 0xff, 0xff, 0xff, 0x01},
		"second CONNECT":             b.connectPacket(t, nil),
		"one megabyte":               publish("fleetd/020000000001/up", strings.Repeat("x", 1<<20), 0),
		"wildcard topic":             publish("fleetd/+/up", "{}", 0),
		"all topics":                 publish("#", "{}", 0),
		"empty topic":                publish("", "{}", 0),
		"topic that is no UTF-8":     publish("fleetd/\xff\xfe/up", "{}", 0),
		"topic beyond the packet":    {0x30, 4, 0, 9, 'a', 'b'},
		"QoS 2":                      publish("fleetd/020000000001/up", "{}", 2),
		"QoS 3":                      {0x36, 4, 0, 1, 'a', 0},
		"packet id 0":                {0x32, 5, 0, 1, 'a', 0, 0},
		"SUBSCRIBE to nothing":       {0x82, 2, 0, 1},
		"SUBSCRIBE cut":              {0x82, 5, 0, 1, 0, 9, 'a'},
		"PUBREL":                     {0x62, 2, 0, 1},
		"reserved type":              {0x00, 0},
	} {
		t.Run("after/"+name, func(t *testing.T) {
			r := b.up(t)
			_, _ = r.Write(what) // the server may close before the last byte
			_, _ = r.Ended(7 * time.Second)
			// security: D11
			devicetest.Eventually(t, "the session ends", func() bool {
				v, err := b.service.Get(t.Context(), id)
				return err == nil && v.State == devices.StateOffline
			})
		})
	}
	// security: D11
	if v, err := b.service.Get(t.Context(), "02:00:00:00:00:02"); err != nil || v.State != devices.StateOnline {
		t.Errorf("the other device is %s, %v", v.State, err)
	}
}

// A message to another device's topic is dropped.
func TestForeignTopic(t *testing.T) {
	b := open(t)
	victim := b.dial(t, "02:00:00:00:00:02", "other")
	t.Cleanup(victim.Close)
	d, err := connect("tcp://"+b.address, b.login(id, "c1"), id, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	const text = `{"type":"listen","state":"start"}`
	for _, topic := range []string{"fleetd/020000000002/up", "fleetd/020000000001/down", "fleetd//up", "$SYS/x", "fleetd/020000000001/up/"} {
		if err := d.Publish(topic, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	for _, topic := range []string{"fleetd/020000000001/up", "device-server"} {
		if err := d.Publish(topic, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "its own messages arrive", func() bool { return len(b.Seen(devices.EventMessage)) == 2 })
	for _, e := range b.Seen(devices.EventMessage) {
		if e.Device != id {
			t.Errorf("a message was attributed to %s", e.Device)
		}
	}
	if n := b.front.Stats().ForeignTopics.Load(); n != 5 {
		t.Errorf("%d foreign topics, want 5", n)
	}
}

// QoS 1 messages are acknowledged, a repeated one too but handled once; SUBSCRIBE,
// PINGREQ and UNSUBSCRIBE are answered.
func TestAnswers(t *testing.T) {
	b := open(t)
	r := b.up(t)
	message := packets.NewControlPacket(packets.Publish).(*packets.PublishPacket)
	message.TopicName, message.Qos, message.MessageID = devices.TopicUp(id), 1, 4711
	message.Payload = []byte(`{"type":"listen","state":"start"}`)
	subscribe := packets.NewControlPacket(packets.Subscribe).(*packets.SubscribePacket)
	subscribe.MessageID, subscribe.Topics, subscribe.Qoss = 5, []string{devices.TopicDown(id), "#", "fleetd/020000000002/down"}, []byte{1, 0, 0}
	unsubscribe := packets.NewControlPacket(packets.Unsubscribe).(*packets.UnsubscribePacket)
	unsubscribe.MessageID, unsubscribe.Topics = 6, []string{"#"}
	r.Send(encode(t, message))
	message.Dup = true
	r.Send(encode(t, message))
	r.Send(encode(t, subscribe))
	r.Send(encode(t, unsubscribe))
	r.Send([]byte{0xc0, 0})
	devicetest.Eventually(t, "it counts as let in", func() bool { all, waiting := b.front.Connected(); return all == 1 && waiting == 0 })
	var got []string
	for len(got) < 5 {
		switch p := r.Packet().(type) {
		case *packets.PubackPacket:
			got = append(got, fmt.Sprint("puback ", p.MessageID))
		case *packets.SubackPacket:
			got = append(got, fmt.Sprint("suback ", p.MessageID, p.ReturnCodes))
		case *packets.UnsubackPacket:
			got = append(got, fmt.Sprint("unsuback ", p.MessageID))
		case *packets.PingrespPacket:
			got = append(got, "pingresp")
		case *packets.PublishPacket: // fleetd requests the tool list
			if p.Qos != 0 || p.TopicName != devices.TopicDown(id) {
				t.Errorf("published %s with QoS %d", p.TopicName, p.Qos)
			}
		}
	}
	if want := "puback 4711|puback 4711|suback 5 [0 128 128]|unsuback 6|pingresp"; strings.Join(got, "|") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, "|"), want)
	}
	if n := len(b.Seen(devices.EventMessage)); n != 1 {
		t.Errorf("the message was handled %d times", n)
	}
}

// A device that sends CONNECT one byte at a time is closed at the timeout, as is one that
// sends nothing.
func TestSlowConnect(t *testing.T) {
	t.Parallel()
	b := open(t)
	begun := time.Now() // before the node starts its timer
	silent, drip := b.raw(t), b.raw(t)
	connect := b.connectPacket(t, nil)
	stop := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for _, c := range connect {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			if _, err := drip.Write([]byte{c}); err != nil {
				return
			}
		}
	}()
	silent.Ended(mqttdevice.ConnectTimeout + 3*time.Second)
	drip.Ended(mqttdevice.ConnectTimeout + 3*time.Second)
	close(stop)
	<-stopped
	if took := time.Since(begun); took < mqttdevice.ConnectTimeout {
		t.Errorf("closed after %v; the timeout is %v", took, mqttdevice.ConnectTimeout)
	}
	devicetest.Eventually(t, "both are closed", func() bool { all, waiting := b.front.Connected(); return all == 0 && waiting == 0 })
}

// Only bytes from the device keep it alive: a dead device to which fleetd keeps sending
// still ends (GW-9).
func TestKeepaliveCountsReceivedBytesOnly(t *testing.T) {
	t.Parallel()
	b := open(t)
	r := b.raw(t)
	r.Send(b.connectPacket(t, func(p *packets.ConnectPacket) { p.Keepalive = 1 }))
	begun := time.Now()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for r.SetReadDeadline(time.Now().Add(10*time.Second)) == nil {
			if _, err := packets.ReadPacket(r); err != nil {
				return
			}
			_ = b.service.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: []byte(`{"type":"custom","payload":{}}`)}) // the device may be disconnected
		}
	}()
	<-done
	if took := time.Since(begun); took < time.Second || took > 6*time.Second {
		t.Errorf("a silent device with keepalive 1 s ended after %v", took)
	}
	devicetest.Eventually(t, "it counts as dead", func() bool { return b.service.Stats().Closed.Get(devices.CloseDead) == 1 })
}

// Packets may arrive in any pieces.
// CONNECT and the rest of a long packet have a deadline; waiting for the next packet has
// none.
func TestNoDeadlineBetweenPackets(t *testing.T) {
	b := open(t)
	d, err := connect("tcp://"+b.address, b.login(id, "c1"), id, false)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	none := func() bool { _, last := b.reads.Read(); return last.IsZero() }
	devicetest.Eventually(t, "the deadline of CONNECT is cleared", none)
	before, _ := b.reads.Read()
	if before == 0 {
		t.Error("CONNECT had no deadline")
	}
	if err := d.Send(`{"type":"listen","state":"` + strings.Repeat("x", 8<<10) + `"}`); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the long packet had a deadline, which is cleared", func() bool {
		sets, _ := b.reads.Read()
		return sets > before && none()
	})
}

func TestPacketsInPieces(t *testing.T) {
	b := open(t)
	r := b.raw(t)
	message := packets.NewControlPacket(packets.Publish).(*packets.PublishPacket)
	message.TopicName = devices.TopicUp(id)
	message.Payload = []byte(`{"type":"listen","text":"` + strings.Repeat("long ", 2000) + `"}`)
	long := encode(t, message)
	message.Payload = []byte(`{"type":"listen"}`)
	short := encode(t, message)
	all := bytes.Join([][]byte{b.connectPacket(t, nil), short, long, short, {0xc0, 0}, long, long[:1], long[1:2], long[2:]}, nil)
	go func() { _, _ = io.Copy(io.Discard, r) }()
	for len(all) > 0 { // 1, 2, 3 ... bytes at a time
		n := min(len(all), 1+len(all)%97)
		r.Send(all[:n])
		all = all[n:]
	}
	devicetest.Eventually(t, "all five arrive", func() bool { return len(b.Seen(devices.EventMessage)) == 5 })
}
