package fleettest

import (
	"bytes"
	"context"
	"math"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/devicetest/client"
	"fleetd/internal/mqttdevice"
	"fleetd/internal/udpaudio"
)

func (b *bench) wire(t testing.TB) client.Raw { return client.DialRaw(t, b.mqtt) }

// packet is the CONNECT packet.
func (l login) packet(keepalive uint16) []byte {
	l.Keepalive = keepalive
	return l.Connect()
}

// A client that does not log in properly is closed at once, with the code of the
// reason, at no cost for others. mqttdevice.TestSlowConnect has those that take their time.
func TestTrap06HostileConnects(t *testing.T) {
	t.Parallel()
	b := open(t)
	healthy := b.device(t, otherID, devicetest.NewScript())
	good := b.login(t, trapID)
	const revoked = devices.ID("02:00:00:00:aa:03")
	old := b.login(t, revoked)
	if _, err := b.service.Revoke(t.Context(), devicetest.Admin, revoked); err != nil {
		t.Fatal(err)
	}
	renewed := old
	renewed.Password = b.mint.DeviceToken(string(revoked), clientOf(string(revoked)), 1)
	wrong, unknown, twoParts, other := good, good, good, good
	wrong.Password = "guess"
	unknown.ClientID = "020000009999"
	twoParts.ClientID = "GID_x@@@02_00_00_00_aa_01"
	other.ClientID = otherID.Token()
	const none = 0xff
	var wg sync.WaitGroup
	for name, c := range map[string]struct {
		output []byte
		code   byte
	}{
		"five-byte length":  {[]byte{0x10, 0xff, 0xff, 0xff, 0xff, 0x7f}, none},
		"256 MB announced":  {[]byte{0x10, 0xff, 0xff, 0xff, 0x7f}, none},
		"two-part id":       {twoParts.packet(60), packets.ErrRefusedIDRejected},
		"wrong password":    {wrong.packet(60), packets.ErrRefusedBadUsernameOrPassword},
		"another's id":      {other.packet(60), packets.ErrRefusedBadUsernameOrPassword},
		"never checked in":  {unknown.packet(60), packets.ErrRefusedBadUsernameOrPassword},
		"dead credentials":  {old.packet(60), packets.ErrRefusedBadUsernameOrPassword},
		"revoked, new ones": {renewed.packet(60), packets.ErrRefusedNotAuthorised},
	} {
		wg.Go(func() {
			w := b.wire(t)
			w.Send(c.output)
			output, took := w.Ended(mqttdevice.ConnectTimeout + 5*time.Second)
			// security: D11
			if want := []byte{0x20, 2, 0, c.code}; c.code == none && len(output) > 0 || c.code != none && !bytes.Equal(output, want) {
				t.Errorf("%s: answered by %x, want code %d", name, output, c.code)
			}
			// security: D11
			if took > mqttdevice.ConnectTimeout/2 {
				t.Errorf("%s: the end came after %v", name, took)
			}
		})
	}
	wg.Wait()
	select {
	case <-healthy.Gone():
		t.Error("the healthy device was thrown out")
	default:
	}
	if _, err := b.call(otherID, volume, `{"volume":1}`, 5*time.Second); err != nil {
		t.Errorf("the healthy device: %v", err)
	}
}

// A dead device to which the server goes on sending is dead; one that sends and gets
// nothing stays.
func TestTrap08KeepaliveCountsReceivedBytes(t *testing.T) {
	t.Parallel()
	b := open(t)
	w, alive := b.wire(t), b.wire(t)
	w.Send(b.login(t, trapID).packet(1))
	alive.Send(b.login(t, otherID).packet(1))
	stop := make(chan struct{})
	var sending sync.WaitGroup
	sent := 0
	sending.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				if b.service.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: trapID, Body: []byte(`{"type":"custom","payload":{}}`)}) == nil {
					sent++
				}
			}
		}
	})
	sending.Go(func() {
		every(t, 300*time.Millisecond, 10, func(int) { // for two times one and a half keepalives
			_, _ = alive.Write([]byte{0xc0, 0}) // fails once the server has closed
		})
	})
	_, took := w.Ended(10 * time.Second)
	devicetest.Eventually(t, "it counts as dead", func() bool { return b.service.Stats().Closed.Get(devices.CloseDead) == 1 })
	close(stop)
	sending.Wait()
	if took < time.Second || took > 6*time.Second || sent < 10 {
		t.Errorf("a device with a keepalive of 1 s ended after %v and %d messages", took, sent)
	}
	if v := b.view(t, otherID); v.State != devices.StateOnline {
		t.Errorf("the device that pings is %s", v.State)
	}
}

// A device that takes nothing makes nobody wait: its queue is bounded, and
// over the bound it is out, for that reason.
func TestTrap11SlowConsumer(t *testing.T) {
	t.Parallel()
	b := open(t)
	b.device(t, otherID, devicetest.NewScript())
	w := b.wire(t)
	if err := w.Conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	w.Send(b.login(t, trapID).packet(600)) // and reads nothing, ever
	devicetest.Eventually(t, "it is online", func() bool {
		v, err := b.service.Get(t.Context(), trapID)
		return err == nil && v.State == devices.StateOnline
	})
	big := strings.Repeat("x", speech.MaxMessage-1000)
	stop := make(chan struct{})
	flood := func(send func(ctx context.Context)) {
		for {
			select {
			case <-stop:
				return
			case <-t.Context().Done():
				return
			default:
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				send(ctx)
				cancel()
			}
		}
	}
	var floods sync.WaitGroup
	floods.Go(func() {
		flood(func(ctx context.Context) { // errors are what it leads to
			_ = b.service.SendMessage(ctx, devices.Message{Principal: devicetest.Admin, Device: trapID, Body: []byte(`{"type":"custom","payload":"` + big + `"}`)})
		})
	})
	floods.Go(func() {
		flood(func(ctx context.Context) {
			_, _ = b.service.CallRPC(ctx, devices.RPCCall{Principal: devicetest.Admin, Device: trapID, Method: "x", Params: []byte(`{"x":"` + big + `"}`)})
		})
	})
	slowest := time.Duration(0)
	made, flooded := 0, time.Now()
	for ; b.service.Stats().Closed.Get(devices.CloseSlow) == 0; made++ {
		begun := time.Now()
		if _, err := b.call(otherID, volume, `{"volume":1}`, 5*time.Second); err != nil {
			t.Fatalf("another device: %v", err)
		}
		b.view(t, trapID)
		slowest = max(slowest, time.Since(begun))
		if time.Since(flooded) > 15*time.Second {
			t.Errorf("the slow device was not closed for that reason: it is %s", b.view(t, trapID).State)
			break
		}
	}
	close(stop)
	floods.Wait()
	t.Logf("%d calls of another device meanwhile, the slowest took %v", made, slowest)
	if slowest > time.Second {
		t.Errorf("the slowest of %d calls of another device took %v", made, slowest)
	}
	if _, err := b.call(trapID, volume, `{"volume":1}`, time.Second); err == nil || err.Code != devices.CodeDeviceOffline {
		t.Errorf("the slow device: %v", err)
	}
	for _, e := range b.Seen(devices.EventOffline) {
		if e.Device != trapID || string(e.Fields) != `"reason":"slow"` {
			t.Errorf("%s is offline: %s", e.Device, e.Fields)
		}
	}
}

// Forged, repeated and reordered datagrams, from here and there: each genuine
// packet is received once, and answers go to the device.
func TestTrap12UDP(t *testing.T) {
	t.Parallel()
	b := open(t)
	d := b.device(t, trapID, devicetest.NewScript())
	c := d.hello(t)
	forger := c.Socket(t)
	forge := func(seq uint32) []byte {
		p := c.SealAs(seq, frame(seq))
		for i := range p[16:] {
			p[16+i] ^= byte(7*i + int(seq) | 1)
		}
		return p
	}
	write := func(conn net.Conn, p []byte) {
		t.Helper()
		if _, err := conn.Write(p); err != nil {
			t.Fatal(err)
		}
	}
	last := uint32(0)
	wantAll := func(what string) {
		t.Helper()
		received := map[uint32]int{}
		devicetest.Eventually(t, what+": all genuine frames are received", func() bool {
			clear(received)
			for _, a := range b.Frames() {
				n, genuine := numberOf(a.Opus)
				if !genuine {
					t.Fatalf("%s: %q was received", what, a.Opus)
				}
				received[n]++
			}
			return len(received) == int(last)
		})
		for n, times := range received {
			if times > 1 {
				t.Errorf("%s: frame %d was received %d times", what, n, times)
			}
		}
	}
	say := func() {
		last++
		c.seq = last
		write(c.Conn, c.SealAs(last, frame(last)))
	}

	for range 10 {
		say()
	}
	wantAll("a quiet start")
	write(forger, forge(math.MaxUint32))
	write(c.Conn, func() []byte { p := c.SealAs(math.MaxUint32, frame(1)); p[16] ^= 0xff; return p }()) // from the device's own address
	for range 10 {
		say()
	}
	wantAll("after the largest sequence")
	for seq := uint32(1); seq <= last; seq++ {
		write(c.Conn, c.SealAs(seq, frame(seq)))
		write(forger, c.SealAs(seq, frame(seq))) // recorded and replayed from elsewhere
	}
	for range 5 {
		say()
	}
	wantAll("after repetitions")
	for _, distance := range []uint32{1, 2, 17, 63} {
		late := last + 1 // arrives `distance` packets late
		for seq := late + 1; seq <= late+distance; seq++ {
			write(c.Conn, c.SealAs(seq, frame(seq)))
		}
		write(c.Conn, c.SealAs(late, frame(late)))
		last = late + distance
		wantAll("reordered")
	}
	for i := range uint32(30) { // the address seems to flip to and fro
		write(forger, forge(last+1+i%3))
		say()
	}
	wantAll("address flip-flop")
	for n := range 10 {
		b.service.SendAudio(trapID, frame(uint32(900+n)))
	}
	for n := range 10 {
		if got, ok := numberOf(await(t, "the answer", c.Packets)); !ok || got != uint32(900+n) {
			t.Errorf("the device received frame %d as answer %d", got, n)
		}
	}
	_ = forger.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // over the loopback, what was sent before the answers has arrived
	if n, err := forger.Read(make([]byte, 1500)); err == nil {
		t.Errorf("the forger got %d bytes", n)
	}
	if s := b.udp.Stats(); s.Moves.Load() != 0 || s.Packets(udpaudio.Replayed) < 20 || s.Packets(udpaudio.Foreign)+s.Packets(udpaudio.Implausible) == 0 {
		t.Errorf("%d moves, %d replayed, %d foreign", s.Moves.Load(), s.Packets(udpaudio.Replayed), s.Packets(udpaudio.Foreign))
	}
}
