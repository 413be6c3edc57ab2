package mqttdevice

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
)

var (
	errLogin = errors.New("user name or password is wrong; restart the device so that it asks the OTA address again")
	errOut   = errors.New("the device is no member of this fleet; restart it so that it asks the OTA address, or approve it")
)

// identify checks CONNECT, from memory, and returns the code to refuse it with
// (section 3.2.2.3): 1 the protocol, 2 the client id, 4 the login, 5 a device
// that is known and may not come in.
func (f *Front) identify(p *packets.ConnectPacket, remote string) (devices.Identity, byte, error) {
	if !isSpoken(p.ProtocolName, p.ProtocolVersion) {
		return devices.Identity{}, packets.ErrRefusedBadProtocolVersion, fmt.Errorf("protocol %.20q level %d; MQTT 3.1 and 3.1.1 are spoken", p.ProtocolName, p.ProtocolVersion)
	}
	if p.Validate() != packets.Accepted && p.ClientIdentifier != "" {
		return devices.Identity{}, packets.ErrRefusedBadUsernameOrPassword, errors.New("CONNECT contradicts itself")
	}
	who, code, err := f.opt.login(p.ClientIdentifier, p.Username, string(p.Password))
	who.Transport, who.Remote = devices.TransportMQTT, remote
	return who, code, err
}

// login finds out who presents these three.
func (o Options) login(clientID, username, password string) (devices.Identity, byte, error) {
	if credential.IsGatewayID(clientID) {
		return o.gatewayLogin(clientID, username, password)
	}
	id, err := devices.ParseID(clientID)
	if err != nil {
		return devices.Identity{}, packets.ErrRefusedIDRejected, fmt.Errorf("client id: %w", err)
	}
	name, marked := credential.ClientOfUser(username)
	who := devices.Identity{Device: id, ClientID: name}
	if len(name) > maxClientID {
		return who, packets.ErrRefusedBadUsernameOrPassword, fmt.Errorf("user name is longer than %d bytes", maxClientID)
	}
	if o.Open {
		return who, packets.Accepted, nil
	}
	generation, proven, admitted := o.Service.Authenticate(id, func(g int64) bool { return o.Mint.IsDevice(password, string(id), name, g) })
	if !marked || !proven {
		return who, packets.ErrRefusedBadUsernameOrPassword, errLogin
	}
	if !admitted {
		return who, packets.ErrRefusedNotAuthorised, errOut
	}
	who.Verified, who.Generation = true, generation
	return who, packets.Accepted, nil
}

// maxClientID bounds a Client-Id, in bytes; the firmware's has 36.
const maxClientID = 128

// gatewayLogin admits devices that still hold what xiaozhi-mqtt-gateway's OTA
// server gave them. The login proves which device it is; whether that belongs
// to the fleet is decided as at an OTA check. It cannot be renewed, so it is
// worth what the first one of fleetd's own is: nothing once the device was
// revoked or forgotten, or the grace of its rotation is over.
func (o Options) gatewayLogin(clientID, username, password string) (devices.Identity, byte, error) {
	mac, uuid, ok := credential.ParseGatewayID(clientID)
	if !ok || uuid == "" {
		return devices.Identity{}, packets.ErrRefusedIDRejected, errors.New("client id must have three parts, GID@@@mac@@@uuid: without the third there is no password to check")
	}
	id, err := devices.ParseID(mac)
	if err != nil {
		return devices.Identity{}, packets.ErrRefusedIDRejected, fmt.Errorf("client id: %w", err)
	}
	if other, err := devices.ParseID(strings.ReplaceAll(uuid, "_", ":")); err == nil && other == id {
		uuid = "" // the manager puts the address there, which is no Client-Id
	}
	who := devices.Identity{Device: id, ClientID: uuid}
	if o.Open {
		return who, packets.Accepted, nil
	}
	if o.Gateway == nil {
		return who, packets.ErrRefusedIDRejected, errors.New("logins of xiaozhi-mqtt-gateway need --gateway-signature-key")
	}
	if _, _, ok := o.Gateway.Verify(clientID, username, password); !ok {
		return who, packets.ErrRefusedBadUsernameOrPassword, errLogin
	}
	welcome, err := o.Service.Recognize(context.Background(), id, uuid)
	switch {
	case err != nil && devices.AsError(err).Code == devices.CodeUnavailable:
		return who, packets.ErrRefusedServerUnavailable, err
	case err != nil:
		return who, packets.ErrRefusedIDRejected, err
	case !welcome.Admitted || !o.Service.Accepts(id, 0):
		return who, packets.ErrRefusedNotAuthorised, errOut
	}
	who.ClientID, who.Verified = o.Service.ClientOf(context.Background(), id), true
	return who, packets.Accepted, nil
}
