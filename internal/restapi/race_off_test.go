//go:build !race

package restapi

const manyLines = 10_000
