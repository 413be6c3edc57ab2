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
	errLogin     = errors.New("wrong user name or password; restart the device so that it requests new credentials from the OTA URL")
	errNotMember = errors.New("the device is not a member of this fleet; approve it, or restart it so that it contacts the OTA URL")
)

// identify checks CONNECT from memory, and returns the CONNACK code of a refusal
// (section 3.2.2.3): 1 the protocol, 2 the client id, 4 the login, 5 a known device that
// is not admitted.
func (f *Front) identify(p *packets.ConnectPacket, remote string) (devices.Identity, byte, error) {
	if !isSupported(p.ProtocolName, p.ProtocolVersion) {
		return devices.Identity{}, packets.ErrRefusedBadProtocolVersion, fmt.Errorf("protocol %.20q level %d is not supported; use MQTT 3.1 or 3.1.1", p.ProtocolName, p.ProtocolVersion)
	}
	if p.Validate() != packets.Accepted && p.ClientIdentifier != "" {
		return devices.Identity{}, packets.ErrRefusedBadUsernameOrPassword, errors.New("CONNECT has contradictory flags and fields")
	}
	who, code, err := f.opt.login(p.ClientIdentifier, p.Username, string(p.Password))
	who.Transport, who.Remote = devices.TransportMQTT, remote
	return who, code, err
}

// login checks the client id, user name and password of a device.
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
	generation, proven, admitted := o.Service.Authenticate(id, name, func(g int64) bool { return o.Mint.IsDevice(password, string(id), name, g) })
	if !marked || !proven {
		return who, packets.ErrRefusedBadUsernameOrPassword, errLogin
	}
	if !admitted {
		return who, packets.ErrRefusedNotAuthorised, errNotMember
	}
	who.Verified, who.OfClient, who.Generation = true, true, generation
	return who, packets.Accepted, nil
}

// maxClientID is the longest Client-Id in bytes; the firmware's has 36.
const maxClientID = 128

// gatewayLogin admits devices with credentials from the OTA server of
// xiaozhi-mqtt-gateway. The login proves the id of the device; whether the device belongs
// to the fleet is decided as in an OTA check. These credentials cannot be renewed, so
// they count as generation 0: they end when the device is revoked or removed, or when the
// grace of its rotation ends.
func (o Options) gatewayLogin(clientID, username, password string) (devices.Identity, byte, error) {
	mac, uuid, ok := credential.ParseGatewayID(clientID)
	if !ok || uuid == "" {
		return devices.Identity{}, packets.ErrRefusedIDRejected, errors.New("the client id must have three parts, GID@@@mac@@@uuid; without the third the password cannot be checked")
	}
	id, err := devices.ParseID(mac)
	if err != nil {
		return devices.Identity{}, packets.ErrRefusedIDRejected, fmt.Errorf("client id: %w", err)
	}
	if other, err := devices.ParseID(strings.ReplaceAll(uuid, "_", ":")); err == nil && other == id {
		uuid = "" // xiaozhi-esp32-server-manager puts the MAC address there, which is not a Client-Id
	}
	who := devices.Identity{Device: id, ClientID: uuid}
	if o.Open {
		return who, packets.Accepted, nil
	}
	if o.Gateway == nil {
		return who, packets.ErrRefusedIDRejected, errors.New("client ids of xiaozhi-mqtt-gateway are accepted only with --gateway-signature-key")
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
		return who, packets.ErrRefusedNotAuthorised, errNotMember
	}
	who.ClientID, who.Verified = o.Service.ClientOf(context.Background(), id), true
	return who, packets.Accepted, nil
}
